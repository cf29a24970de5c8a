"""Workers of the benchmark that only pretend: they answer from a table, at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import load, measure
from benchmarks.cases import Case
from benchmarks.driver import Worker
from benchmarks.measure import CaseResult, Settings

FAKE = """
import json, os, sys, time

spec, requests, answers = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
plans = json.loads(open(PLANS).read())
key = spec["mode"] + "/" + spec["variant"]
plan = plans.get(key) or plans.get(spec["mode"], {})
answers = os.fdopen(answers, "w")
with open(STARTED, "a") as file:
    file.write(f"{key} {os.getpid()}\\n")
for line in os.fdopen(requests):
    request = json.loads(line)
    do = request["do"]
    if do == "exit":
        break
    if do == plan.get("dies_at"):
        print("the last words of", key, flush=True)
        os._exit(9)
    found = os.path.join(os.environ["ACC_CACHE_DIR"], "found")
    name = "warm" if os.path.exists(found) else "cold"
    if do == plan.get("hangs_at") or (name == "warm" and do == plan.get("hangs_warm_at")):
        time.sleep(600)
    if do == plan.get("raises_at"):
        answer = {"error": "Traceback\\n" + plan.get("error", "ValueError: from " + key)}
    elif do == "build":
        answer = {"versions": {"torch": "0"}}
    elif do == "cold":
        open(found, "w").close()
        first, total = plan.get(name, (0.5, 2.0))
        answer = {"first_step_s": first, "total_s": total}
    elif do == "check":
        values = plan.get("values", [1.0, 2.0])
        digest = plan.get("digest", "same")
        answer = {"checksum": {"digest": digest, "values": values, "sketch": [[1.0, 0.5]]}}
    elif do == "window":
        answer = {"seconds": request["steps"] * plan.get("ms", 10.0) / 1000.0}
    elif do == "memory":
        answer = {"peak_mib": plan.get("peak", 100.0), "host_peak_mib": 0.0}
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()
"""


class Fakes:
    """Runs cases whose workers answer from a table of plans, one per mode or mode/variant."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "fake.py"
        self.plans = folder / "plans"
        self.started = folder / "started"
        source = FAKE.replace("PLANS", repr(str(self.plans)))
        self.script.write_text(source.replace("STARTED", repr(str(self.started))))
        self.started.write_text("")

    def spawn(self, spec, caches=None) -> Worker:
        return Worker(spec, (sys.executable, str(self.script)), caches=caches)

    def measure(self, plans: dict, modes: tuple[str, ...], **options) -> CaseResult:
        self.plans.write_text(json.dumps(plans))
        case = options.pop("case", Case("fake", "a fake", must={"eager": 1.0}))
        suite = options.pop("suite", "host")
        settings = Settings(suite, modes, (load.choose_cores(1)[0],), spawn=self.spawn, **options)
        return measure.measure_case(case, settings)

    def alive(self) -> list[int]:
        pids = [int(line.split()[1]) for line in self.started.read_text().splitlines()]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def lines_of(result: CaseResult, kind: str) -> dict[str, dict]:
    return {line["mode"]: line for line in result.lines if line["kind"] == kind}
