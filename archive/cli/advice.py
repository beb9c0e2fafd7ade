"""What the library's messages advise, in words of the command line: an argument of Python is an option here.

A message that names an argument which no command has would send people to write a program; `tests/cli/test_advice.py`
looks for such.
"""

from __future__ import annotations

import re

_EVERYWHERE = (
    (r"raise deadline_s", "give a longer --retry-for"),
    (r"open it with archive\.open\(\.\.\., allow_bases=\['?([^'\]]*)'?\]\)", r"add --allow-base \1"),
    (r"(?:open|connect) with single_writer=True", "add --single-writer"),
    (r"plan with allow_missing=True", "add --allow-missing"),
    (r"plan the last whole one \(arc\.checkpoints[^ ]*latest\)", "name another --checkpoint"),
    (r"arc\.checkpoints\.of\(.*?\), or --run", "--run"),
    (r"say force=True", "add --force"),
    (r"give copy=True", "add --copy"),
    (r"copy with verify=True", "copy with --verify"),
    (r"pass replace=True", "add --replace"),
    (r"make one with archive\.create\(\), or check the URL", "`archive import` makes one; or check the URL"),
    (r"; open it with archive\.open\(\)", ""),
    (r"(?:pass such settings in|check) storage_options", "check --storage-option"),
    (r"leave it out with fields=", "leave it out: name the others with --field"),
    (
        r"pass missing='skip' to leave it out, or missing=VALUE to fill it in",
        "`archive show` lists those of an episode",
    ),
    (r"make the buffer with missing='skip'", "give --missing skip"),
    (r"(?:Make the buffer with )?missing=VALUE", "--missing VALUE"),
    (r"missing='skip'", "--missing skip"),
    (r"\bnum_envs=", "--num-envs "),
    (r"\bmax_length=", "--max-length "),
    (r"\bcapacity=", "--capacity "),
    (r"give another host= or port=", "give another --host or --port"),
)
_OF_ADAPTERS = (  # options of an adapter are given with --set
    (r"\b([a-z_]+)='([^']*)'", r"--set \1=\2"),
    (r"\b([a-z_]+)=True\b", r"--set \1=true"),
    (r"\b([Gg]ive|name|with) ([a-z_]+)=(?=[;,. ]|$)", r"\1 --set \2=VALUE"),
)
_WITH_SET = frozenset({"export", "import"})


def in_options(text: str, command: str | None = None) -> str:
    """A message as somebody needs it who gave `command`, and no Python."""
    for pattern, option in (*_EVERYWHERE, *(_OF_ADAPTERS if command in _WITH_SET else ())):
        text = re.sub(pattern, option, text)
    return text
