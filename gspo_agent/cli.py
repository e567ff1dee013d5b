"""gspo-agent: every command, each a thin door to the room that does the work."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from gspo_agent.errors import ConfigError, GspoAgentError
from gspo_agent.interruption import Interruption

if TYPE_CHECKING:
    from gspo_agent.config import Config

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Reinforcement learning of multi-turn, tool-using language models.\n\n"
    "Begin with `gspo-agent train examples/math.toml`: a small model learns to use a Python tool, on two CPU cores, "
    "in a few minutes. Press Ctrl-C at any time; the same line goes on where it was.",
)
ConfigPath = Annotated[Path, typer.Argument(help="A TOML file, such as examples/math.toml.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Changes to the file: `learner.lr=1e-5`, `run.dir=runs/other`, `env.0.limits.turns=6`.",
        show_default=False,
    ),
]
RunDir = Annotated[Path, typer.Argument(help="A run directory, such as runs/math.", show_default=False)]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    allow_changes: Annotated[
        bool, typer.Option(help="Go on in a run directory whose model or environments were others.")
    ] = False,
) -> None:
    """Train, or go on with a run that was cut.

    The run directory (`run.dir`) holds everything. Whatever ended the last start (Ctrl-C, SIGTERM, a crash,
    `kill -9`), the same line continues: episodes go on at the token, tool call or turn where they were.
    """
    from gspo_agent.config import Config

    _train(Config.load(config, overrides or []), allow_changes)


@app.command()
def serve(config: ConfigPath, overrides: Overrides = None) -> None:
    """Start the SGLang servers of a configuration (`[engine.servers]`), watch them, and start them again when they die.

    `train` starts its own where it finds none. With these it uses them instead, so that they outlive its restarts.
    Ctrl-C ends them all; their logs are in `servers/` of the run directory.
    """
    from gspo_agent.config import Config
    from gspo_agent.serving import serve

    Interruption(goodbye="stopped, and the servers with it").run(serve(Config.load(config, overrides or [])))


@app.command()
def resume(run_dir: RunDir, overrides: Overrides = None) -> None:
    """Go on with a run from its directory alone, with the configuration of its last start.

    `gspo-agent resume runs/math run.steps=60` goes on to step 60.
    """
    from gspo_agent.run import Run

    _train(Run.open(run_dir).config().override(overrides or []), allow_changes=False)


@app.command()
def status(
    run_dir: RunDir,
    everything: Annotated[bool, typer.Option("--all", help="Every episode in flight, not only the longest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """Show where a run stands, alive or not: what each episode waits for and since when, what stands still, what a
    restart now would lose, groups, attempts, failures by cause, how old tokens are, and how to go on.

    Needs no lock and writes nothing: it works on a live run, a dead one, a copy, a read-only directory, and from
    another host on a network file system.
    """
    import orjson

    from gspo_agent.run import Run

    report = Run.open(run_dir).report()
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_INDENT_2
    if as_json:
        print(orjson.dumps(report.as_json(), default=tuple, option=options).decode())
    else:
        print(report.text(everything))


@app.command()
def audit(run_dir: RunDir) -> None:
    """Prove from its journal that a run lost no task, trained none twice and sampled no token again.

    Needs no lock, so it also works on a live run and on a copy. Exit status 1 on a breach.
    """
    from gspo_agent.rollout.audit import audit as audit_journal
    from gspo_agent.run import Run

    result = audit_journal(Run.open(run_dir).journal)
    print(result)
    raise typer.Exit(bool(result.breaches))


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(help="The directory to write.", show_default=False)],
) -> None:
    """Write the episodes that a run's journal holds now as Parquet: one file a step, one row an attempt.

    Messages, token ids, logprobs, weight versions, rewards, and what became of each. Also works while the run is
    alive. `datasets.load_dataset("parquet", data_dir=OUT)` reads the directory.
    """
    from gspo_agent.rollout.export import export_run
    from gspo_agent.run import Run

    run = Run.open(run_dir)
    written = export_run(run.journal, out)
    print(f"{sum(written.values())} episodes in {len(written)} files in {out}")
    if run.episodes.is_dir():
        print(f"those of earlier steps are in {run.episodes}")


@app.command(name="eval")
def evaluate(
    config: Annotated[Path, typer.Argument(help="A TOML file or a run directory.", show_default=False)],
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="A model directory; default: the newest checkpoint.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes per task: pass@1 to pass@k.")] = 1,
) -> None:
    """Measure a frozen policy on the held-out tasks: avg@k with its standard error, pass@k, tool use.

    `gspo-agent eval runs/math --samples 4` measures the newest checkpoint of a run.
    """
    from gspo_agent.evaluate import evaluate_policy

    work = evaluate_policy(*_loaded(config, overrides), model=model, samples=samples)
    metrics = Interruption().run(work)
    print(json.dumps(metrics, indent=1))


@app.command()
def rollout(
    config: Annotated[Path, typer.Argument(help="A TOML file or a run directory.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The JSONL file to write, one episode a line.", show_default=False)],
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="A model directory; default: the newest checkpoint.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many tasks.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Episodes per task.")] = 1,
    split: Annotated[str, typer.Option(help="Which tasks.")] = "train",
) -> None:
    """Run episodes without learning and write them down: messages, reward, token ids, logprobs, versions."""
    from gspo_agent.evaluate import collect

    written, failures = Interruption().run(
        collect(*_loaded(config, overrides), model=model, out=out, episodes=episodes, samples=samples, split=split)
    )
    failed = f"; {len(failures)} failed and are not in it, the first with {failures[0]}" if failures else ""
    print(f"{written} episodes in {out}{failed}")


@app.command()
def merge(
    adapter: Annotated[
        Path, typer.Argument(help="A run directory, or a checkpoint of one with `learner.lora`.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write.", show_default=False)],
) -> None:
    """Write a whole model: the adapter that a run trained (`learner.lora`), merged into the model that it is of.

    A checkpoint itself is an adapter's directory as PEFT has it, for whatever loads those.
    """
    from gspo_agent.engine.adapter import is_adapter
    from gspo_agent.learner.checkpoint import merge
    from gspo_agent.run import Run

    print(merge(adapter if is_adapter(adapter) else Run.open(adapter).newest_checkpoint(), out))


@app.command()
def check(
    env: Annotated[
        str | None,
        typer.Argument(help="`gspo_agent/Calculator-v0`, a Gymnasium id, or `module:Class`.", show_default=False),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Also check the chat template of this model directory.")] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="Instead: JSONL of workspace tasks, judged without a change and with their `patch`."),
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Where relative images are; default: beside --tasks.")] = None,
    times: Annotated[int, typer.Option(min=1, help="How often each task is judged, to find flaky tests.")] = 3,
    backend: Annotated[str, typer.Option(help="How the code of tasks is isolated.")] = "auto",
) -> None:
    """Check an environment against the contract, and name each breach. Exit status 1 if there is any.

    With --tasks, check a file of tasks of `gspo_agent/Workspace-v0` instead: one JSON object for each on standard
    output, `id`, `ok`, `tests`, `problems`, `flaky`. Exit status 1 if any is not sound.
    """
    if tasks is not None and env is None:
        from gspo_agent.entry_points import load_judge

        work = load_judge("workspaces")(tasks, images, backend, times)
        raise typer.Exit(bool(Interruption(goodbye="stopped; what was checked is printed").run(work)))
    if env is None or tasks is not None:
        raise ConfigError("give one environment to check, or --tasks FILE")
    from gspo_agent.chat import load_chat
    from gspo_agent.env import check_env, load_env

    breaches = check_env(load_env(env), load_chat(model) if model else None)
    for breach in breaches:
        print(f"- {breach}")
    print(f"{env}: " + (f"{len(breaches)} breaches" if breaches else "keeps the contract"))
    raise typer.Exit(bool(breaches))


@app.command()
def judge(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSONL, one row a line: `solution`, `tests` (objects of `stdin` and `stdout`, or of `args` and "
            "`expected`, or the source of a pytest file), maybe `id`, `entry_point`, `cls`, `compare`, `module`, "
            "`count`, `time_limit`. Or JSON with a list of `cases`.",
            show_default=False,
        ),
    ],
    backend: Annotated[str, typer.Option(help="How the code is isolated.")] = "auto",
) -> None:
    """Judge solutions against their unit tests, isolated: a data set, or what a run wrote.

    One JSON object for each on standard output, as soon as it is judged: `id`, `verdict`, `passed`, `total`, `reason`,
    `ms`. The count of each verdict comes last, on standard error. Exit status 1 when a row could not be used.
    """
    from gspo_agent.entry_points import load_judge

    judge_file = load_judge("unit_tests")
    unusable = Interruption(goodbye="stopped; what was judged is printed").run(judge_file(file, backend))
    raise typer.Exit(bool(unusable))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; default: any, without [sandbox].")] = None,
    overrides: Overrides = None,
) -> None:
    """Show what isolates the code of models on this machine, try to break out of it, and say how to get more.

    Exit status 1 where nothing isolates: code is refused there rather than run unconfined.
    """
    from gspo_agent.config import Config
    from gspo_agent.sandbox import SandboxSettings
    from gspo_agent.sandbox.doctor import examine

    section = Config.load(config, overrides or []).sandbox.model_dump() if config else {}
    diagnosis = examine(SandboxSettings(**section))
    print(diagnosis)
    raise typer.Exit(diagnosis.chosen is None)


@app.command()
def verify(
    gold: Annotated[str, typer.Option(help="The right answer, for --text.")] = "",
    text: Annotated[str, typer.Option(help=r"A message with its answer in \\boxed{}.")] = "",
    jsonl: Annotated[
        Path | None,
        typer.Option(
            help="Rows of `text` or `text_parts`, `gold`, maybe `id` and `answer_type`, `choices`, `multi`, `rel_tol`, "
            "`decimals`, `second_opinion`. Or JSON with a list of `cases`. `-` reads rows from standard input.",
        ),
    ] = None,
    anchors: Annotated[bool, typer.Option(help="Whether 'The answer is ...' counts where there is no box.")] = True,
    second_opinion: Annotated[
        bool, typer.Option("--second-opinion", help="Ask math-verify about what sympy leaves undecided too.")
    ] = False,
) -> None:
    """Verify mathematical answers: what was extracted, whether it is the gold answer, and why.

    One JSON object for each on standard output: `id`, `correct`, `reason`, `extracted`, `path`, `ms`. The count of each
    reason comes last, on standard error. Exit status 1 when a row or a gold answer could not be used, or no verdict
    reached.
    """
    from gspo_agent.entry_points import load_judge

    if jsonl is None and not gold:
        raise ConfigError("nothing to verify: give --jsonl FILE, or --text and --gold")
    if jsonl is not None and (gold or text):
        raise ConfigError("give either --jsonl or --text and --gold; the rows of a file have their own")
    verify_file = load_judge("math")
    work = verify_file(jsonl, text=text, gold=gold, anchors=anchors, second_opinion=second_opinion)
    raise typer.Exit(bool(Interruption(goodbye="stopped; what was verified is printed").run(work)))


@app.command()
def init_env(
    name: Annotated[str, typer.Argument(help="The environment's name, such as `shop`.", show_default=False)],
    directory: Annotated[Path, typer.Option(help="Where to write it.")] = Path(),
) -> None:
    """Write a new tool-use environment with its test, ready to be changed. The test passes at once."""
    from gspo_agent.scaffold import scaffold

    written = scaffold(name, directory)
    for path in written:
        print(f"wrote {path}")
    module, test = written
    title = re.findall(r"^class (\w+)", module.read_text(), re.MULTILINE)[0]
    print(f"next, in {directory.resolve()}:")
    print(f"  gspo-agent check {module.stem}:{title}")
    print(f"  python -m pytest {test.name}     (pip install pytest)")


@app.command()
def init_model(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Copy the model here; default: leave it in the cache.")] = None,
) -> None:
    """Make the small model of a configuration: Qwen3's architecture and chat format, and a short supervised start.

    `train` does this by itself; here it is for a look at the model before any reinforcement learning.
    """
    import shutil

    from gspo_agent.assembly import env_factories, find_model
    from gspo_agent.config import Config
    from gspo_agent.monitor.screen import Screen

    loaded = Config.load(config, overrides or [])
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists; give --out a directory that does not")
    if loaded.model != "tiny":
        raise ConfigError(f"{config}: model is {loaded.model!r}; only model = 'tiny' is made here")
    with Screen(loaded) as screen:
        made = find_model(loaded, env_factories(loaded), None, screen)
    if out is not None:
        made = shutil.copytree(made, out)
    print(made)


def main() -> None:
    """The console script: errors of the framework are one message, without a traceback."""
    # An environment in the user's folder is importable as module:Class, as with `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        app()
    except GspoAgentError as error:
        # `shop:Parrot:` is a name, not an emoji.
        console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        console.print(f"{type(error).__name__}: {error}")
        sys.exit(1)


def _loaded(path: Path, overrides: list[str] | None) -> tuple[Config, Any]:
    """The configuration of a TOML file or of a run directory, and the run if there is one."""
    from gspo_agent.config import Config
    from gspo_agent.run import Run

    if path.is_dir():
        run = Run.open(path)
        return run.config().override(overrides or []), run
    return Config.load(path, overrides or []), None


def _train(config: Config, allow_changes: bool) -> None:
    from gspo_agent.trainer import train_async

    interruption = Interruption(config.run.grace, "stopped; the same line goes on from here")
    interruption.run(train_async(config, allow_changes=allow_changes, interruption=interruption))


if __name__ == "__main__":
    main()
