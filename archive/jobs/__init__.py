"""Jobs: work over all that is stored, in batches, on any number of workers. A function or another procedure comes in;
the results of batches, each made once, are on the store, and commits of them go out."""

from __future__ import annotations

from archive.jobs.columns import Terms, frozen_episodes, map_columns
from archive.jobs.cost import estimate
from archive.jobs.job import COLUMNS, Batches, Job, Jobs
from archive.jobs.receipts import Agree, Items, Procedure, Receipt, Result
from archive.jobs.records import JobRound, is_record, is_result, job_of
from archive.jobs.runner import JobCall, JobRequest, Progress
from archive.jobs.workers import Crew

__all__ = [
    "COLUMNS",
    "Agree",
    "Batches",
    "Crew",
    "Items",
    "Job",
    "JobCall",
    "JobRequest",
    "JobRound",
    "Jobs",
    "Procedure",
    "Progress",
    "Receipt",
    "Result",
    "Terms",
    "estimate",
    "frozen_episodes",
    "is_record",
    "is_result",
    "job_of",
    "map_columns",
]
