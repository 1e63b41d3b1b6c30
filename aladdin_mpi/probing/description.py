"""Parser of a cluster's description in words: hosts, workers, rates and times.

Phrases may be in any order. Each pattern removes its phrase from the text, the longest phrases
first. Remaining filler words ("with", "each") are ignored; any other rest is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.settings import Setting

EXAMPLE = "16 nodes x 4 GPUs, 25 Gbit/s, latency 20 us, step 0.18 s"
EXAMPLES = (
    EXAMPLE,
    "one node 3x slower",
    "node 2 3x slower",
    "one worker 10x slower",
    "node 3 at 10 Gbit/s",
    "memory 10 GB/s",
    "jitter 5 %",
)

NUMBER = r"(?<![\w.-])(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
COUNT = rf"(?<![\w.-])(\d+|an?|{'|'.join(WORDS)})"
HOST = r"(?:nodes?|hosts?|machines?|sites?|regions?|data\s?cent(?:er|re)s?)\b"
"""A site, region or data centre counts as a host: its workers share its link."""
WORKER = r"(?:gpus?|workers?|ranks?|tasks?)\b"
# "Gb/s" are bits and "GB/s" bytes: only here is case significant.
PER_SECOND = r"(?:\s*(?:/|per\s)\s*s(?:ec(?:ond)?)?|ps|e)?\b"
RATE = NUMBER + r"\s*(?-i:([kKmMgGtT])(bits?|Bits?|bytes?|Bytes?|BYTES?|BITS?|b|B))" + PER_SECOND
TIME = NUMBER + r"\s*(seconds?|secs?|s|milliseconds?|ms|microseconds?|us|minutes?|min)\b"
LIST = r"\d+(?:\s*(?:,|and|,\s*and)\s*\d+)*"
SLOWER = r"(?:(\d+(?:\.\d+)?)\s*(?:x|times|-fold)|(\d+(?:\.\d+)?)\s*%)\s*(?:as\s+)?slow(?:er)?\b"
INSIDE = rf"(?:local|(?:inside|within)(?:\s+(?:a|each|one))?(?:\s+{HOST})?)"
OF = r"\s*(?:bandwidth|time|takes?|of|is|:|=|\s)*"
BETWEEN = rf"between\s+(?:them\b|(?:the\s+|all\s+)?{HOST})"
ROUND_TRIP = r"(?:rtt|ping|round[\s-]?trip)\b(?:\s+(?:time|latency)\b)?"

GIGABITS = {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}
MICROSECONDS = {"m": 1e3, "u": 1.0, "s": 1e6}
NOTHING = re.compile(
    r"(?:x|with|of|and|at|on|in|by|to|the|a|an|all|each|every|per|has|have|is|are|links?|network|apart|"
    r"ethernet|infiniband|cluster|between|them|bandwidth|that|which|connected|linked|across|over|"
    r"wan|one[\s-]way|,|;|:|\.|-|\s)*",
    re.IGNORECASE,
)
TAKEN = "\0"
"""Marks the position of a removed phrase."""

Match = re.Match[str]


def described(text: str) -> dict[str, Setting]:
    """Return the settings in a description, by the names of the probe's options.

    Raises:
        UserError: a part of it is not understood, or a property is specified twice.
    """
    return _Parser(text).read()


class _Parser:
    """Parser of one text, from which phrases are removed."""

    def __init__(self, text: str) -> None:
        self._whole = text
        plain = text.replace("\u00b5", "u").replace("\u03bc", "u").replace("\u00d7", " x ")
        plain = re.sub(r"\btwice(?=\s+(?:as\s+)?slow)", "2 times", plain, flags=re.IGNORECASE)
        plain = re.sub(rf"\b({'|'.join(WORDS)})(?=\s+times\b)", _digits, plain, flags=re.IGNORECASE)
        plain = re.sub(
            r"\b([kmgt])(?:ilo|ega|iga|era)(?=(?:bit|byte)s?\b)", r"\1", plain, flags=re.IGNORECASE
        )
        self._rest = re.sub(r"\bx(?=\d)", "x ", plain)
        self._settings: dict[str, Any] = {}
        self._phrases: dict[str, str] = {}
        self._is_vague = False
        """The number of workers may be that of a host or of all."""

    def read(self) -> dict[str, Setting]:
        self._take(
            rf"(?:{COUNT}\s+(?:of\s+the\s+)?)?({HOST}|{WORKER})\s*"
            rf"(?:#?({LIST})\s+)?(?:is|are|runs?)?\s*{SLOWER}",
            self._slower,
        )
        self._take(rf"[^,;{TAKEN}]*\bfaster\b", lambda match: _refuse(match[0].strip()))
        self._take(rf"memory{OF}{RATE}|{RATE}\s*(?:of\s+)?memory\b", self._memory)
        self._take(rf"{INSIDE}{OF}{RATE}|{RATE}\s*{INSIDE}", self._rate("local_bandwidth_gbit"))
        self._take(
            rf"(?:\b(one|an?)\s+{HOST}|{HOST}\s*#?({LIST}))\s*(?:at|has|have|with|on|a|only|link|of|\s)*\s"
            rf"{RATE}",
            self._link,
        )
        self._take(RATE, self._rate("bandwidth_gbit"))
        self._take(
            rf"{INSIDE}\s*latency{OF}{TIME}|latency\s*{INSIDE}{OF}{TIME}"
            rf"|{TIME}\s*(?:of\s+)?(?:{INSIDE}\s*latency|latency\s*{INSIDE})",
            self._time("local_latency_us"),
        )
        self._take(
            rf"{ROUND_TRIP}{OF}{TIME}|(?:latency{OF})?{TIME}\s*(?:of\s+)?{ROUND_TRIP}",
            self._time("latency_us", part=0.5),
        )
        self._take(
            rf"latency\s*(?:{BETWEEN})?{OF}{TIME}|{TIME}\s*(?:of\s+)?latency\b"
            rf"|{TIME}\s*(?=(?:and\s+{TAKEN}\s*)?(?:between|apart)\b)",
            self._time("latency_us"),
        )
        self._take(BETWEEN, lambda _: None)
        self._take(
            rf"\bsteps?{OF}{TIME}|{TIME}\s*(?:per|an?|each|for\s+a|/)\s*step\b",
            self._time("step_seconds"),
        )
        self._take(
            rf"\bjitter{OF}{NUMBER}\s*(%?)|{NUMBER}\s*(%?)\s*(?:of\s+)?jitter\b", self._jitter
        )
        self._take(TIME, self._bare_time)
        self._take(
            rf"{COUNT}[\s-]*{WORKER}\s*(?:(in\s+total|in\s+all|altogether|total)|"
            rf"(on|at|in|across|over)\s+(?={COUNT}\s*{HOST})"
            rf"|((?:per|(?:(?:on|at|in)\s+)?each|an?)\b|/)\s*(?:{HOST})?)?",
            self._workers,
        )
        self._take(rf"{COUNT}[\s-]*{HOST}", self._hosts)
        self._check_rest()
        self._divide_workers()
        return {name: Setting(value, "--describe") for name, value in self._settings.items()}

    def _take(self, pattern: str, interpret: Callable[[Match], None]) -> None:
        def replace(match: Match) -> str:
            interpret(match)
            return TAKEN

        self._rest = re.sub(pattern, replace, self._rest, flags=re.IGNORECASE)

    # -- phrases
    def _slower(self, match: Match) -> None:
        count, kind, numbers, times, percent = match.groups()
        factor = float(times) if times else 1 + float(percent) / 100
        name = "node_slowdown" if re.match(HOST, kind, re.IGNORECASE) else "slowdown"
        self._set_each(name, self._numbered(numbers, count, name), factor, match)

    def _link(self, match: Match) -> None:
        count, numbers, *rate = match.groups()
        self._set_each("links", self._numbered(numbers, count, "links"), _gbit(rate), match)

    def _set_each(self, name: str, numbers: list[int], value: float, match: Match) -> None:
        values = self._settings.setdefault(name, {})
        for number in numbers:
            if number in values:
                raise UserError(
                    f"--describe: {_phrase(match)!r} and an earlier phrase set the same property "
                    f"of number {number}. Leave one out, or name another number."
                )
            values[number] = value

    def _numbered(self, numbers: str | None, count: str | None, name: str) -> list[int]:
        """Return the listed numbers, or ``count`` numbers without the property ``name``."""
        if numbers:
            return [int(number) for number in re.findall(r"\d+", numbers)]
        taken = self._settings.get(name, {})
        free = (number for number in range(10**9) if number not in taken)
        return [next(free) for _ in range(_count(count or "one"))]

    def _memory(self, match: Match) -> None:
        self._set("memory_gbyte", _gbit(match.groups()) / 8, match)

    def _rate(self, name: str) -> Callable[[Match], None]:
        return lambda match: self._set(name, _gbit(match.groups()), match)

    def _time(self, name: str, part: float = 1.0) -> Callable[[Match], None]:
        """Return a function that sets an option to ``part`` of a time."""
        unit = 1e6 if name == "step_seconds" else 1.0
        return lambda match: self._set(name, part * _microseconds(match.groups()) / unit, match)

    def _bare_time(self, match: Match) -> None:
        """Interpret microseconds as the latency, and seconds as the time of a step."""
        value, unit = match.groups()
        if unit.lower().startswith(("mil", "ms")):
            raise UserError(
                f"--describe: expected the meaning of {value} {unit}, got the time alone; write "
                f'"step {value} {unit}", "latency {value} {unit}" or "round trip {value} {unit}"'
            )
        self._time("latency_us" if _letter(unit) == "u" else "step_seconds")(match)

    def _jitter(self, match: Match) -> None:
        value, percent = [part for part in match.groups() if part is not None]
        self._set("jitter", float(value) / (100 if percent else 1), match)

    def _workers(self, match: Match) -> None:
        count, total, on, _, each = match.groups()
        self._set("total" if total or on else "gpus_per_node", _count(count), match)
        before, after = match.string[: match.start()].rstrip(), match.string[match.end() :]
        is_listed = not before or before[-1] in f",;.{TAKEN}" or before.endswith(" and")
        follows = re.match(r"\s*(?:x|on)\b", after, re.IGNORECASE)
        self._is_vague = is_listed and not (total or on or each or follows)

    def _hosts(self, match: Match) -> None:
        self._set("nodes", _count(match[1]), match)

    def _set(self, name: str, value: float, match: Match) -> None:
        phrase = _phrase(match)
        if name in self._phrases:
            raise UserError(
                f"--describe: {self._phrases[name]!r} and {phrase!r} cannot be combined. Leave one "
                "out."
            )
        self._phrases[name] = phrase
        self._settings[name] = value

    def _divide_workers(self) -> None:
        """Divide a total number of workers by the number of hosts."""
        hosts = self._settings.get("nodes", 1)
        if self._is_vague and hosts > 1:
            workers = self._settings["gpus_per_node"]
            raise UserError(
                f"--describe: {self._phrases['gpus_per_node']!r} may be those of each or of all "
                f'{hosts} hosts. Write "{workers} per host" or "{workers} workers in total".'
            )
        total = self._settings.pop("total", None)
        if total is None:
            return
        if total % hosts or "gpus_per_node" in self._settings:
            raise UserError(
                f"--describe: expected the same number of workers on each of {hosts} hosts, got "
                f'{self._phrases["total"]!r}; write for example "{hosts} nodes x 4 GPUs"'
            )
        self._settings["gpus_per_node"] = total // hosts

    def _check_rest(self) -> None:
        for part in re.split(rf"{TAKEN}|[,;]", self._rest):
            if not NOTHING.fullmatch(part):
                _refuse(" ".join(part.split()))
        if not self._settings:
            _refuse(self._whole)


def _refuse(part: str) -> NoReturn:
    examples = ", ".join(f'"{example}"' for example in EXAMPLES)
    raise UserError(
        f"--describe: expected numbers of hosts and workers, rates and times, got {part!r}; "
        f"write for example {examples}"
    )


def _phrase(match: Match) -> str:
    return " ".join(match[0].replace(TAKEN, " ").split())


def _count(word: str) -> int:
    word = word.lower()
    if word in ("a", "an"):
        return 1
    return WORDS.index(word) + 1 if word in WORDS else int(word)


def _digits(match: Match) -> str:
    return str(_count(match[0]))


def _gbit(groups: Any) -> float:
    value, prefix, unit = [part for part in groups if part is not None]
    is_bytes = unit == "B" or unit.lower().startswith("byte")
    return float(f"{float(value) * GIGABITS[prefix.lower()] * (8 if is_bytes else 1):.12g}")


def _microseconds(groups: Any) -> float:
    value, unit = [part for part in groups if part is not None]
    scale = 6e7 if unit.lower().startswith("min") else MICROSECONDS[_letter(unit)]
    return float(f"{float(value) * scale:.12g}")


def _letter(unit: str) -> str:
    """Return ``s``, ``m`` or ``u`` for seconds, milliseconds or microseconds."""
    return "u" if unit.lower().startswith("micro") else unit[0].lower()
