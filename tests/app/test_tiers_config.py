"""The section `tiers`: what the table means, and what is wrong with a bad one."""

from __future__ import annotations

import math
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import ConfigError, UserConfig, load_config
from app.config.errors import problems_of
from app.config.tiers import TiersConfig
from policies.tiers import MAX_TIERS, decaying_headroom


def tiers(**section: Any) -> TiersConfig:
    """The section, checked."""
    return load_config({"tiers": section}, "cpu").tiers


def levels(*names: str, **more: Any) -> list[dict[str, Any]]:
    """A table of tiers with these names."""
    return [{"name": name, **more} for name in names]


def test_default_table() -> None:
    """Four tiers, `standard` the default, headroom by the formula, aging of half a minute."""
    config = tiers()
    assert config.names == ["critical", "standard", "relaxed", "background"]
    assert config.names[config.default_tier] == "standard"
    assert config.tiers().headroom == decaying_headroom(4)
    assert config.tiers().aging_s == (30.0,) * 4


@given(st.integers(1, MAX_TIERS))
def test_any_number_of_tiers(count: int) -> None:
    """1 to 16 tiers make a spec with one entry each that crosses pickle and msgspec unchanged."""
    config = tiers(
        levels=levels(*(f"t{i}" for i in range(count)), aging_s=None, ttft_slo_s=2.0), default=f"t{count - 1}"
    )
    assert config.default_tier == count - 1
    assert len(config.tiers()) == count
    assert config.tiers().aging_s == (math.inf,) * count
    spec = config.spec()
    assert set(spec) == {"names", "headroom", "aging_s", "ttft_slo_s", "tpot_slo_s"}
    assert {len(column) for column in spec.values()} == {count}
    assert spec["ttft_slo_s"] == [2.0] * count
    assert pickle.loads(pickle.dumps(spec)) == msgspec.msgpack.decode(msgspec.msgpack.encode(spec)) == spec


def test_headroom_of_a_tier_wins_over_the_formula() -> None:
    """Given shares stay, the others follow h_max, lambda and cap; one tier alone keeps nothing free."""
    config = tiers(
        levels=[{"name": "a"}, {"name": "b", "headroom": 0.5}, {"name": "c"}],
        default="a",
        headroom={"h_max": 0.1, "lambda": "auto", "cap": 1.0},
    )
    formula = decaying_headroom(3, 0.1, "auto", 1.0)
    assert config.headroom_shares == [formula[0], 0.5, formula[2]]
    assert tiers(levels=levels("only")).headroom_shares == [0.0]


@pytest.mark.parametrize(
    ("section", "path", "allowed", "remedy"),
    [
        ({"levels": []}, "tiers.levels", "1 to 16", "merge"),
        ({"levels": levels(*(f"t{i}" for i in range(17))), "default": "t0"}, "tiers.levels", "1 to 16", "merge"),
        ({"levels": levels("a", "a"), "default": "a"}, "tiers.levels[1].name", "each once", "rename"),
        (
            {"levels": levels("a", "b", service_tiers=["x"]), "default": "a"},
            "tiers.levels[1].service_tiers[0]",
            "once",
            "",
        ),
        ({"levels": levels("7")}, "tiers.levels[0].name", "matching", "allowed value"),
        ({"levels": [{}]}, "tiers.levels[0].name", "text", "add it"),
        ({"levels": levels("a", aging_s=0)}, "tiers.levels[0].aging_s", ">= 0.001", "default 30.0"),
        ({"levels": levels("a", headroom=1.5)}, "tiers.levels[0].headroom", "<= 1", "default null"),
        ({"levels": levels("a", max_queued=0)}, "tiers.levels[0].max_queued", ">= 1 or null", "default null"),
        ({"levels": levels("a", priority=1)}, "tiers.levels[0].priority", "name", "place in the list"),
        ({"levels": levels("a", headroom=1)}, "tiers.levels", "less than 1", "lower some"),
        ({"levels": levels("a", "b")}, "tiers.default", "a, b", "name the default"),
        ({"default": "standrd"}, "tiers.default", "critical", "did you mean standard"),
        ({"headroom": {"lambda": -1}}, "tiers.headroom.lambda", ">= 0 and <= 100 or auto", "default 1.0"),
        ({"headroom": {"decay": 1}}, "tiers.headroom.decay", "h_max, lambda, cap", "remove it"),
        ({"headroom": {"cap": "x"}}, "tiers.headroom.cap", "<= 1", "default 0.35"),
        ({"headroom": {"h_max": math.nan}}, "tiers.headroom.h_max", "<= 1", "default 0.2"),
        ({"level": []}, "tiers.level", "levels", "did you mean levels"),
    ],
)
def test_a_bad_table_names_the_field(section: dict[str, Any], path: str, allowed: str, remedy: str) -> None:
    """Each mistake is one problem with its own path, range and remedy."""
    with pytest.raises(ConfigError) as refused:
        tiers(**section)
    (problem,) = refused.value.problems
    assert problem.path == path
    assert allowed in problem.allowed
    assert remedy in problem.remedy


def test_tiers_are_no_live_setting() -> None:
    """A user_config with tiers is refused with the place where they belong."""
    with pytest.raises(ValueError, match="tiers") as refused:
        UserConfig.model_validate({"tiers": {}})
    (problem,) = problems_of(refused.value, UserConfig, {"tiers": {}})  # type: ignore[arg-type]
    assert problem.path == "tiers"
    assert "below `args`" in problem.remedy
