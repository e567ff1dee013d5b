"""The smallest environment: a prompt, a tool, a score. Try it: gspo-agent check examples.stock:Stock"""

from gspo_agent.env import ToolEnv, tool


class Stock(ToolEnv):
    def sample_task(self):
        return {"apples": int(self.np_random.integers(100))}

    def prompt(self, task):
        self.apples = task["apples"]
        return "How many apples are in stock?"

    @tool
    def count(self) -> int:
        """Count the apples."""
        return self.apples

    def score(self, task, answer):
        return float(answer == str(task["apples"]))
