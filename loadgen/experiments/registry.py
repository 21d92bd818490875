"""Experiments by name; a module that has some is listed here."""

from __future__ import annotations

from loadgen.experiments import survey_ablations, survey_engine, survey_fleet, tiers_paper
from loadgen.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for module in (survey_engine, survey_fleet, survey_ablations, tiers_paper)
    for one in module.EXPERIMENTS
}
