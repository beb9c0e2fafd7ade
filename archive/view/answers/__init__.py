"""An archive that is shown, and what a browser asks of it, become a Reply; one function a question. No HTTP in here."""

from __future__ import annotations

from archive.view.answers.about import about, writable
from archive.view.answers.cameras import pictures
from archive.view.answers.completion import check, names, values
from archive.view.answers.distributions import distributions
from archive.view.answers.exporting import page
from archive.view.answers.fieldrows import field_rows
from archive.view.answers.following import news
from archive.view.answers.histograms import histograms
from archive.view.answers.labelling import next_unlabelled, offered, said_of, say, say_of_all
from archive.view.answers.looking import episode
from archive.view.answers.planning import forgetting, plan
from archive.view.answers.rollouts import group, rollout
from archive.view.answers.saved import checkpoint, checkpoints, column, tails
from archive.view.answers.series import curves, steps
from archive.view.answers.shown import Settings, Shown
from archive.view.answers.strips import strip
from archive.view.answers.tables import neighbours, rows

__all__ = [
    "Settings",
    "Shown",
    "about",
    "check",
    "checkpoint",
    "checkpoints",
    "column",
    "curves",
    "distributions",
    "episode",
    "field_rows",
    "forgetting",
    "group",
    "histograms",
    "names",
    "neighbours",
    "news",
    "next_unlabelled",
    "offered",
    "page",
    "pictures",
    "plan",
    "rollout",
    "rows",
    "said_of",
    "say",
    "say_of_all",
    "steps",
    "strip",
    "tails",
    "values",
    "writable",
]
