"""CPU that a proxy spends per request and per streamed event, kvlane beside other proxies.

    python bench/cpu.py [--peers sglang-router,nginx] [--case 1k ...] [--rounds 3] [--seconds 4] [--json]

Microseconds of user and system time of all processes of a proxy, over what the mock engines served meanwhile. On a
shared machine this is far steadier than requests per second, and ratios within one run are steadier still: in every
round each proxy is measured once per case (A B A B), and a ratio is the median over the ratios of the rounds.
Proxies run on core 0, load and engines on core 1, all proxies with one worker and four pods. Needs gcc, wrk, taskset.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import peers
from rig import EVENTS, Engines, Load, Program, Rig, Running, ask, chat, post_script, prose, say, table

BASE = "sglang-router"


@dataclass(frozen=True)
class Case:
    """`new`: a prompt that no pod has seen, every time; else the same one over and over."""

    name: str
    about: str
    prompt_bytes: int
    connections: int
    stream: bool = False
    interval_us: int = 0
    new: bool = False

    @property
    def per(self) -> str:
        return "events" if self.interval_us else "requests"

    def body(self) -> bytes:
        return chat(prose(self.prompt_bytes), stream=self.stream, interval_us=self.interval_us)

    def script(self) -> str:
        script = post_script(self.body())
        return script + NEW_PROMPTS.replace("UNIQUE", str(time.time_ns())) if self.new else script

    def window(self, seconds: float) -> float:
        """Of streams that start together only whole ones give each kind of work its share."""
        length = self.interval_us * (EVENTS + 1) / 1e6
        return max(1, round(seconds / length)) * length if length else seconds


NEW_PROMPTS = """
local before, after = wrk.body:match('^(.-"content":")(.*)$')
local n = 0
request = function()
  n = n + 1
  return wrk.format(nil, nil, nil, before .. "UNIQUE " .. n .. " " .. after)
end
"""

CASES = {
    case.name: case
    for case in (
        Case("1k", "JSON, a prompt of 1 KB", 1000, 16),
        Case("32k", "JSON, 32 KB", 32_000, 16),
        Case("128k", "JSON, 128 KB", 128_000, 8),
        Case("burst", f"{EVENTS} events at once, 1 KB", 1000, 16, stream=True),
        Case(
            "paced", f"an event: {EVENTS} of them 20 ms apart, 256 streams", 1000, 256, stream=True, interval_us=20_000
        ),
        Case("32k-new", "JSON, 32 KB, never seen before", 32_000, 16, new=True),
        Case("128k-new", "JSON, 128 KB, never seen before", 128_000, 8, new=True),
    )
}
DEFAULT_CASES = ("1k", "32k", "128k", "burst", "paced")


@dataclass(frozen=True)
class Sample:
    """One proxy, one case, one round. Latencies are from wrk, in microseconds, at full load."""

    program: str
    case: str
    round: int
    cpu_us: float
    per_second: float
    busy: float
    rss_mib: float
    latency: dict[str, float]
    failures: dict[str, int]


def main() -> None:
    options = _options()
    programs = peers.chosen(options)
    cases = [CASES[name] for name in options.case or DEFAULT_CASES]
    with Rig(options.proxy_cores, options.load_cores) as rig:
        samples = list(_measured(rig, programs, cases, options))
    base = options.base if options.base in {program.name for program in programs} else programs[0].name
    if options.json:
        print(json.dumps(_as_json(programs, cases, samples, base), indent=1))
    else:
        print(_as_text(programs, cases, samples, base))
    if any(sum(sample.failures.values()) for sample in samples):
        sys.exit("some responses were invalid: the figures of these cases mean nothing")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_options(parser)
    parser.add_argument(
        "--case", action="append", choices=CASES, help=f"repeatable  [default: {' '.join(DEFAULT_CASES)}]"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of measurement per proxy, case and round")
    parser.add_argument("--warm", type=float, default=1.5, help="seconds of the same load before")
    parser.add_argument("--base", default=BASE, help=f"what ratios are to  [default: {BASE}, else the first]")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0 or options.warm < 0:
        parser.error("--rounds and --seconds must be more than 0")
    return options


def _measured(rig: Rig, programs: list[Program], cases: list[Case], options: argparse.Namespace) -> Iterable[Sample]:
    engines = rig.engines()
    running = [rig.start(program, engines) for program in programs]
    for proxy in running:
        for case in cases:
            ask(proxy.site.port, case.body())
    for number in range(options.rounds):
        for case in cases:
            for proxy in running:
                sample = _sample(rig, proxy, engines, case, number, options)
                say(f"round {number + 1}  {case.name:<9} {proxy.name:<14} {sample.cpu_us:9.1f} us {_complaint(sample)}")
                yield sample


def _sample(rig: Rig, proxy: Running, engines: Engines, case: Case, number: int, options: argparse.Namespace) -> Sample:
    """Both ends of the window lie inside the load, so that nothing but its steady state is counted."""
    window = case.window(options.seconds)
    proxy.trim_log()
    before = engines.count()
    result = rig.wrk(proxy.site.port, case.script(), case.connections, options.warm + window + 1)
    time.sleep(options.warm)
    started, cpu, count = time.perf_counter(), proxy.cpu_seconds(), engines.count()
    time.sleep(window)
    seconds, spent, after = time.perf_counter() - started, proxy.cpu_seconds() - cpu, engines.count()
    rss = proxy.rss_kib() / 1024
    load = result()
    done = after[case.per] - count[case.per]
    failures = load.failures | _miscounted(engines.count()["requests"] - before["requests"], load, case)
    return Sample(
        program=proxy.name,
        case=case.name,
        round=number,
        cpu_us=round(spent / max(1, done) * 1e6, 2),
        per_second=round(done / seconds),
        busy=round(spent / seconds, 3),
        rss_mib=round(rss, 1),
        latency=load.latency,
        failures=failures if done else failures | {"nothing served": 1},
    )


def _miscounted(counted: int, load: Load, case: Case) -> dict[str, int]:
    """A figure is worth something only if a request of a client is one to an engine; the last ones are cut off."""
    surplus = counted - load.requests
    return {} if 0 <= surplus <= 2 * case.connections else {"requests that only one side counted": abs(surplus)}


def _as_text(programs: list[Program], cases: list[Case], samples: list[Sample], base: str) -> str:
    head = ["", *(case.name for case in cases)]
    figures, ratios = [["microseconds of CPU: median (min)", *head[1:]]], [[f"ratio to {base}", *head[1:]]]
    by = _by(samples)
    for program in programs:
        cells, compared = [], []
        for case in cases:
            runs = by[program.name, case.name]
            values = [sample.cpu_us for sample in runs]
            failed = any(map(_complaint, runs))
            cells.append("failed" if failed else f"{statistics.median(values):.1f} ({min(values):.1f})")
            compared.append("-" if failed else f"{_ratio(by, program.name, base, case.name):.2f}")
        figures.append([f"{program.name} {program.version}", *cells])
        ratios.append([program.name, *compared])
    legend = "\n".join(f"{case.name}: {case.about}" for case in cases)
    return f"{table(figures)}\n\n{table(ratios)}\n\n{legend}"


def _as_json(programs: list[Program], cases: list[Case], samples: list[Sample], base: str) -> dict[str, object]:
    by = _by(samples)
    results = [
        {
            "program": program.name,
            "version": program.version,
            "case": case.name,
            "per": "event" if case.interval_us else "request",
            "cpu_us_median": statistics.median(sample.cpu_us for sample in by[program.name, case.name]),
            "cpu_us_min": min(sample.cpu_us for sample in by[program.name, case.name]),
            "ratio": round(_ratio(by, program.name, base, case.name), 3),
        }
        for program in programs
        for case in cases
    ]
    return {"base": base, "results": results, "samples": [asdict(sample) for sample in samples]}


def _by(samples: list[Sample]) -> dict[tuple[str, str], list[Sample]]:
    by: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        by[sample.program, sample.case].append(sample)
    return by


def _ratio(by: dict[tuple[str, str], list[Sample]], program: str, base: str, case: str) -> float:
    pairs = zip(by[program, case], by[base, case], strict=True)
    return statistics.median(one.cpu_us / max(0.01, other.cpu_us) for one, other in pairs)


def _complaint(sample: Sample) -> str:
    return " ".join(f"{kind}: {count}" for kind, count in sample.failures.items() if count)


if __name__ == "__main__":
    main()
