from pathlib import Path

import pytest

from gspo_agent.config import Config
from gspo_agent.errors import ConfigError
from gspo_agent.learner_config import GRPO, GSPO

MINIMAL = 'model = "tiny"\n[[env]]\nid = "gspo_agent/Calculator-v0"\n[run]\ndir = "runs/x"\n'


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_the_papers_band_is_the_default(toml: Path) -> None:
    loss = Config.load(toml).learner.loss
    assert loss == GSPO(clip_low=3e-4, clip_high=4e-4)


def test_an_omitted_clip_is_that_losses_own_default(toml: Path) -> None:
    assert Config.load(toml, ['learner.loss={name="grpo"}']).learner.loss == GRPO(name="grpo", clip_low=0.2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.group_sze=4", "unknown key rollout.group_sze; did you mean 'group_size'?"),
        ("env.0.limits.turn=4", "unknown key env.0.limits.turn; did you mean 'turns'?"),
        ("learner.loss.clip_hihg=1", "unknown key learner.loss.gspo.clip_hihg; did you mean 'clip_high'?"),
        ("rollout.group_size=many", "rollout.group_size: Input should be a valid integer"),
        ("rollout.group_size=1", "rollout.group_size: Input should be greater than or equal to 2 (given 1)"),
        ("env.0.limits.wall=20 fortnights", "'20 fortnights' is not a duration"),
        ("rollout.min_group=9", "rollout.min_group 9 is above group_size 8"),
        ("engine.kind=vllm", "engine.kind: Input should be 'local' or 'sglang'"),
        ("engine.servers.count=2", 'engine: servers are given, but kind is "local"; write kind = "sglang"'),
        (
            'engine={kind="sglang", servers={args={tp_size=2}}}',
            "engine.servers: args.tp_size is not passed on; it is set by engine.servers.tp",
        ),
        ("engine.weights=tensor", "engine: weights = 'tensor' is not for kind = \"local\"; leave it out"),
        ("engine.stream=true", 'engine: stream = True is not for kind = "local"'),
        (
            'engine={kind="sglang", max_running=4}',
            'engine: max_running = 4 is not for kind = "sglang"',
        ),
        (
            'engine={kind="sglang", weights="tensor", servers={dp=2}}',
            "engine: servers.dp = 2 makes replicas or pipeline stages, which take weights from disk only",
        ),
        ('engine={kind="sglang", weights="distributed", servers={args={pp_size=2}}}', "servers.args.pp_size = 2 makes"),
        (
            'engine={kind="sglang", servers={port=65535, count=2}}',
            "engine.servers: port 65535 and the next for 2 servers end at 65536; 65535 is the last",
        ),
        ('engine={kind="sglang", urls=["http://a:99999"]}', "'http://a:99999' is no address of a server (Port out of"),
        ('engine={kind="sglang", urls=["http://:1"]}', "'http://:1' is no address of a server; write it as in"),
        ('engine={kind="sglang", urls=["http://a b:1"]}', "'http://a b:1' is no address of a server"),
        ('engine.urls=["http://a"]', 'engine: urls are given, but kind is "local"; write kind = "sglang"'),
        ('engine={kind="sglang", urls=["a:3"]}', "engine.urls.0: String should match pattern"),
        ("engine.pause_mode=gently", "engine.pause_mode: Input should be 'in_place', 'retract' or 'abort'"),
        ("learner.loss.name=ppo", "does not match any of the expected tags: 'gspo', 'gspo_token', 'grpo'"),
        ("zzz=1", "unknown key zzz; known here: cold_start, engine, env"),
        ("rollout", "'rollout' is not key=value"),
        ("model.name=x", "model is a value, not a section"),
        ("env.limits.turns=3", "write the number of the [[env]] first, 0 to 0"),
        ("env.4.limits.turns=3", "write the number of the [[env]] first, 0 to 0"),
        ("env={id='x'}", "env: there may be several environments: write [[env]], with two brackets"),
        ("env.0.limits.wall=1.2.3s", "'1.2.3s' is not a duration"),
        ("rollout.temperature=inf", "rollout.temperature: Input should be a finite number"),
        ("learner.lr=nan", "learner.lr: Input should be a finite number"),
        ("learner.betas=[0.9, 2]", "learner.betas.1: Input should be less than 1 (given 2)"),
        ("run.seed=-1", "run.seed: Input should be greater than or equal to 0 (given -1)"),
        ("run.steps=true", "run: steps = true, but it is not a switch"),
        ("cold_start.heads=3", "cold_start: hidden_size 128 is no multiple of 2 * heads = 6"),
        ("cold_start.kv_heads=3", "cold_start: heads 4 is no multiple of kv_heads = 3"),
        ("learner.loss={clip=1}", "unknown key learner.loss.gspo.clip; did you mean 'clip_low'?"),
    ],
)
def test_a_bad_key_or_value_is_named_with_its_place_and_remedy(toml: Path, override: str, message: str) -> None:
    overrides = ['learner.loss.name="gspo"', override] if override.startswith("learner.loss.clip") else [override]
    with pytest.raises(ConfigError) as caught:
        Config.load(toml, overrides)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_every_problem_gets_its_own_line(toml: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(toml, ["rollout.group_size=x", "run.stepz=3"])
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        Config.load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("model = ")
    with pytest.raises(ConfigError, match=r"broken.toml: not readable as TOML"):
        Config.load(broken)


def test_overrides_read_toml_values_and_bare_words(toml: Path) -> None:
    config = Config.load(
        toml, ["learner.lr=1e-5", "env.0.limits.wall=20m", "run.dir=runs/y", "env.0.options.flaky=0.3"]
    )
    assert config.learner.lr == 1e-5
    assert config.env[0].limits.wall == 1200.0
    assert config.run.dir == Path("runs/y")
    assert config.env[0].options == {"flaky": 0.3}
    assert config.base_dir == toml.parent


def test_an_override_of_a_loaded_configuration_keeps_the_rest(toml: Path) -> None:
    config = Config.load(toml, ["learner.lr=1e-5"]).override(["run.steps=7"])
    assert (config.learner.lr, config.run.steps, config.base_dir) == (1e-5, 7, toml.parent)


def test_identity_ignores_what_may_change_between_starts(toml: Path) -> None:
    config = Config.load(toml)
    assert config.override(["learner.lr=1e-5", "run.steps=9"]).identity() == config.identity()
    assert config.override(["rollout.group_size=4"]).identity() != config.identity()
    assert config.override(["cold_start.layers=3"]).identity() != config.identity()


def test_a_file_as_other_editors_write_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert Config.load(path).model == "tiny"


@pytest.mark.parametrize("name", ["", "run.toml/inside", "x" * 300])
def test_a_path_that_is_no_file_is_named(toml: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not readable as TOML"):
        Config.load(toml.parent / name)


def test_a_tilde_is_the_home_directory(toml: Path) -> None:
    assert Config.load(toml, ["run.dir=~/runs"]).run.dir == Path.home() / "runs"


def test_a_number_of_the_default_loss_changes_alone(toml: Path) -> None:
    assert Config.load(toml, ["learner.loss.clip_low=1e-3"]).learner.loss == GSPO(clip_low=1e-3)
