"""The cases in which the modules of archive/docs/spec are explored: the protocol as it is, and as it would be without
each of its guards."""

from __future__ import annotations

from typing import Any

from tests.support.specification import Case

MODULES: dict[str, tuple[str, dict[str, Any]]] = {  # name of a run -> the module, and its constants
    "Commits": ("Commits", {"Intents": ("a", "a", "b")}),
    "Retention": ("Retention", {}),
    "Tags": ("Retention", {}),
    "Sessions": ("Sessions", {"Runs": ("main", "main")}),
    "Forks": ("Sessions", {"Runs": ("main", "fork", "fork")}),
    "Ledger": ("Ledger", {}),
}
SOUND = {
    "Commits": [Case((), "lost", (3,))],
    "Retention": [
        Case((), "save recover forget prune wait", (4, 2)),
        Case((), "save partial forget prune wait plan", (4, 2)),
        Case((), "recover compact forget undo prune", (5, 3)),
        Case((), "recover forget pin prune wait plan", (4, 2)),
        Case((), "recover forget undo prune wait read", (5, 2)),
    ],
    "Tags": [Case((), "recover forget tag undo prune wait", (6, 2))],
    "Sessions": [Case((), "start tick save light recover prune", (1, 1))],
    "Forks": [Case((), "start save", (0, 1))],
    "Ledger": [
        Case((), "crash save remove forget", (2, 5)),
        Case((), "crash save column", (1, 4)),
        Case((), "crash save", (3, 3)),
    ],
}
LARGE = {  # minutes each
    "Commits": [Case((), "lost", (4,))],
    "Retention": [
        Case((), "save partial recover compact forget undo tag prune pin wait read", (4, 2)),
        Case((), "save recover compact forget undo tag prune wait", (6, 3)),
        Case((), "recover compact forget undo prune wait read", (7, 3)),
        Case((), "recover forget undo tag pin prune wait plan", (6, 2)),
    ],
    "Sessions": [
        Case((), "start tick save light recover prune", (2, 1)),
        Case((), "start tick save recover prune", (1, 2)),
    ],
    "Forks": [Case((), "start tick save recover prune", (1, 1))],
    "Ledger": [Case((), "crash save remove forget", (2, 7)), Case((), "crash save remove column", (3, 6))],
}
MUTANTS = {
    "Commits": [
        Case(("create",), "", (3,), "AcknowledgedStays", 6),
        Case(("found by its intent",), "lost", (3,), "OnceCommitted", 7),
        Case(("every commit since",), "lost", (3,), "OnceCommitted", 11),
        Case(("commits stay",), "lost", (3,), "NumbersGivenOnce", 11),
    ],
    "Retention": [
        Case(("borrowed",), "save recover forget prune wait", (5, 2), "NothingDangles", 9),
        Case(("borrowed",), "save partial forget prune wait", (4, 1), "NothingDangles", 7),
        Case(("named",), "recover prune wait", (3, 1), "NothingDangles", 5),
        Case(("running",), "save prune wait", (2, 1), "JobsKeepTheirs", 4),
        Case(("wait",), "save recover forget prune read", (4, 2), "ReadersRead", 8),
        Case(("wait of what stands",), "recover compact forget undo prune wait read", (7, 3), "ReadersRead", 13),
        Case(("pin seen",), "recover forget pin prune wait plan", (4, 2), "PinsHold", 12),
        Case(("pinned since",), "recover forget pin prune wait plan", (4, 2), "PinsHold", 12),
        Case(("moved",), "recover compact save forget", (4, 3), "ForgottenStaysSo", 7),
        Case(("protected",), "save forget", (2, 1), "NewestIsWhole", 3),
        Case(("decided anew",), "recover forget plan", (3, 3), "NewestIsWhole", 4),
        Case(("undone whole",), "recover forget undo prune wait", (5, 2), "NothingDangles", 9),
        Case(("listed anew",), "recover forget undo prune wait plan", (5, 2), "NothingDangles", 6),
        Case(("listed first",), "recover forget undo prune wait", (5, 2), "UndoWorks", 7),
    ],
    "Tags": [
        Case(("retained",), "recover forget tag prune wait", (5, 2), "TagsAreWhole", 9),
        Case(("tagged", "tagged whole"), "recover forget tag prune wait", (5, 2), "TagsAreWhole", 9),
        Case(("tagged whole",), "recover compact forget undo tag prune wait", (8, 3), "TagsAreWhole", 13),
    ],
    "Sessions": [
        Case(("seen",), "start", (0, 0), "NoLateStart", 6),
        Case(("seen", "ended", "nothing left", "no newer checkpoint"), "start tick", (1, 0), "AcknowledgedStays", 8),
        Case(("ended",), "start tick", (1, 0), "AcknowledgedStays", 8),
        Case(("slot",), "start tick", (1, 0), "AcknowledgedStays", 8),
        Case(("nothing left",), "start tick", (1, 0), "AcknowledgedStays", 8),
        Case(("no newer checkpoint",), "start save", (0, 1), "CheckpointsStay", 8),
        Case(("fence",), "start save", (0, 1), "OneWriter", 8),
        Case(("grows",), "start tick save recover prune", (2, 1), "AcknowledgedStays", 10),
        Case(("rows once",), "start tick save recover", (1, 2), "CountedOnce", 8),
        Case(("same base",), "start tick save recover", (1, 1), "TrainingGrows", 8),
        Case(("light",), "start tick save light recover", (1, 2), "AcknowledgedStays", 12),
        Case(("look",), "start tick prune", (1, 0), "AcknowledgedStays", 9),
    ],
    "Forks": [Case(("begun once",), "start save", (0, 1), "CheckpointsStay", 13)],
    "Ledger": [
        Case(("order by sequence",), "clock crash", (1, 4), "TrainedOnce", 4),
        Case(("seal with its steps",), "crash", (1, 3), "SealedIsThere", 4),
        Case(("trained with the weights",), "crash", (1, 3), "NoneSkipped", 5),
        Case(("removed with the training",), "crash remove", (1, 3), "SealedIsThere", 6),
        Case(("awaited",), "crash remove forget", (1, 3), "SealedIsThere", 7),
        Case(("cursor that all passed",), "crash", (3, 2), "NoneBehind", 3),
        Case(("columns of all",), "crash column", (1, 1), "ColumnsAreWhole", 2),
    ],
}
LIVENESS = [  # module, constants, property, case; with a guard taken out the property does not hold
    ("Turns", {}, "EachIsSaved", Case((), "", (2,))),
    ("Turns", {}, "EachIsSaved", Case(("bounded tries",), "", (2,))),
    ("Commits", {"Intents": ("a", "b")}, "EachCommits", Case((), "lost", (2,))),
    ("Commits", {"Intents": ("a", "b")}, "EachCommits", Case(("found by its intent",), "lost", (2,))),
    ("Sessions", {"Runs": ("main", "main")}, "Opens", Case((), "start tick save light recover", (1, 1))),
    ("Sessions", {"Runs": ("main", "main", "main")}, "Opens", Case(("ended by any",), "start", (0, 0))),
]
