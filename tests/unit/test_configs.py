"""The config: refused with the field's name, the same through YAML, never with secrets, and documented."""

import math
from pathlib import Path
from typing import Any

import pytest

from agentrl_runtime.configs import SECRET_FIELDS, AgentTrainingConfig, load_config, validated
from agentrl_runtime.configs_doc import config_page
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training.shards import FilterSpec

MODEL = {"model_name_or_path": "model"}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "model_name_or_path"),
        ({**MODEL, "learning_rat": 1}, "learning_rat"),
        ({**MODEL, "learning_rate": 0}, "learning_rate"),
        ({**MODEL, "learning_rate": "fast"}, "learning_rate"),
        ({**MODEL, "run_id": "Demo 1"}, "run_id"),
        ({**MODEL, "num_generations": 0}, "num_generations"),
        ({**MODEL, "inf_mem_ratio": 1.5}, "inf_mem_ratio"),
        ({**MODEL, "epsilon": math.inf}, "epsilon"),
        ({**MODEL, "adv_scaling": math.inf}, "adv_scaling"),
        ({**MODEL, "preferred_sampling_params": {"temperature": math.nan}}, "temperature is nan"),
        ({**MODEL, "preferred_sampling_params": {"temperature": "hot"}}, "temperature is 'hot'"),
        ({**MODEL, "preferred_sampling_params": {"top_p": 0.9, "n": 4}}, "n is no sampling parameter"),
        ({**MODEL, "stage": "sft"}, "loss_calculater"),
        ({**MODEL, "loss_calculater": "CrossEntropy"}, "loss_calculater"),
        ({**MODEL, "oss_connection_string": "ftp://x"}, "oss_connection_string"),
        ({**MODEL, "advantage_estimator": "magic"}, "advantage_estimator"),
    ],
)
def test_wrong_values_name_their_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(AgentRLError, match=field):
        validated(values, where="test")


def test_yaml_and_back(tmp_path: Path) -> None:
    config = AgentTrainingConfig(run_id="demo-1", train_file=Path("a/b.jsonl"), learning_rate=3e-4, **MODEL)
    config.write_yaml(tmp_path / "c.yaml")
    again = load_config(tmp_path / "c.yaml")
    assert again == config and again.digest() == config.digest()
    assert load_config(tmp_path / "c.yaml", {"seed": 7}).seed == 7
    assert again.dataset_name == "b"


@pytest.mark.parametrize("text", ["a: [", "- a\n- b\n", "just text"])
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(AgentRLError, match=r"c\.yaml"):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AgentRLError, match="does not exist"):
        load_config(tmp_path / "none.yaml")


def test_secrets_are_in_no_public_form(tmp_path: Path) -> None:
    config = AgentTrainingConfig(
        db_connection_string="mongodb://u:hunter2@h/d", oss_connection_string="minio://k:hunter2@h:1/b", **MODEL
    )
    config.write_yaml(tmp_path / "c.yaml")
    assert "hunter2" not in str(config.public_dict()) + (tmp_path / "c.yaml").read_text()
    assert config.digest() == AgentTrainingConfig(**MODEL).digest()
    assert not SECRET_FIELDS & config.public_dict().keys()


def test_the_environment_changes_no_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "99")
    monkeypatch.setenv("LEARNING_RATE", "1")
    assert AgentTrainingConfig(**MODEL).seed == 0


def test_every_value_changes_the_digest() -> None:
    assert AgentTrainingConfig(seed=1, **MODEL).digest() != AgentTrainingConfig(seed=2, **MODEL).digest()


def test_filter_spec_comes_from_the_config() -> None:
    config = AgentTrainingConfig(drop_truncated=True, adv_scaling=2.0, max_tokens=99, **MODEL)
    spec = FilterSpec.from_config(config)
    assert (spec.drop_truncated, spec.adv_scaling, spec.max_tokens) == (True, 2.0, 99)
    assert spec.digest() == FilterSpec.from_config(config).digest() != FilterSpec().digest()


def test_the_page_of_fields_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == config_page(), "run `python -m agentrl_runtime.configs_doc > docs/config.md`"
    assert all(field.description for field in AgentTrainingConfig.model_fields.values())
