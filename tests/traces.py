"""Traces of runs that never were, for tests and for a look at the page: ``python -m tests.traces FOLDER [SAMPLES]``."""

import json
import random
import sys
from pathlib import Path

GROUPS, SIZE, SERVERS = 32, 8, 4


class Synthetic:
    """The rows of a synchronous run with a long tail, evaluations, failures, and tools in every fifth group."""

    def __init__(self, seed: int = 0) -> None:
        self.dice = random.Random(seed)
        self.rows: list[list] = [["run", 1.7e9, "0"]]
        self.clock, self.samples, self.step = 1.0, 0, 0

    def sample(self, group: str, of: int) -> float:
        """When it ended."""
        dice, rows = self.dice, self.rows
        self.samples += 1
        number, begin = self.samples, self.clock + dice.random() * 0.2
        rows.append(["begin", number, begin, group, of, f"task-{dice.randrange(500)}"])
        at = begin + dice.expovariate(2)
        rows.append(["span", number, "queue", begin, at, "", 0, []])
        turns, tokens = dice.randint(2, 5) if number // SIZE % 5 == 0 else 1, 0
        for turn in range(turns):
            made = int(min(4096, dice.lognormvariate(5.3, 0.9))) // turns + 1
            split = [0.01, 0.04] if dice.random() < 0.5 else []
            where, end = f"127.0.0.1:{40000 + number // SIZE % SERVERS}", at + 0.05 + made / 90
            rows.append(["span", number, "generate", at, end, where, made, split])
            tokens, at = tokens + made, end + (dice.expovariate(1.5) if turn + 1 < turns else 0)
        if dice.random() < 0.004:
            rows.append(["fail", number, at, "POST /inference/v1/generate answered 500: <b>engine</b> died"])
            return at
        judged = at + dice.random() * 0.1
        end = judged + dice.expovariate(6)
        rows.append(["span", number, "reward queue", at, judged, "", 0, []])
        rows.append(["span", number, "reward", judged, end, f"reward-worker-{number % 4}", 0, []])
        finish = "stop" if tokens < 4000 else "length"
        rows.append(["end", number, end, 60, tokens, self.step, self.step, finish, dice.random()])
        return end

    def group(self, name: str) -> float:
        return max(self.sample(name, of) for of in range(SIZE))

    def phase(self, name: str, end: float) -> None:
        self.rows += [["phase", name, self.step, self.clock, None], ["phase", name, self.step, self.clock, end]]
        self.clock = end

    def one_step(self) -> None:
        if self.step % 4 == 0:
            self.phase("eval", max(self.group(f"eval-test-{index}") for index in range(4)))
        ends = {name: self.group(name) for name in (f"g{self.step * GROUPS + index}" for index in range(GROUPS))}
        for name, end in ends.items():
            filtered = "zero_variance" if self.dice.random() < 0.1 else None
            self.rows.append(["group", name, self.clock, end, filtered])
        kept = [row[1] for row in self.rows if row[0] == "group" and row[1] in ends and row[4] is None]
        for second in range(int(self.clock) + 1, int(max(ends.values()))):
            load = [int(60 * self.dice.random()) * (second % 7 > 1), 0, second, second / 9, second * 9]
            self.rows.append(["load", second, {f"127.0.0.1:{40000 + index}": load for index in range(SERVERS)}])
        self.phase("rollout", max(ends.values()))
        self.rows.append(["batch", self.clock, self.step + 1, kept])
        self.phase("train", self.clock + 3 + self.dice.random())
        self.step += 1
        self.phase("sync", self.clock + 0.7)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        return folder


def synthetic(folder: Path, samples: int) -> Path:
    """Of so many samples or a few more."""
    made = Synthetic()
    while made.samples < samples:
        made.one_step()
    return made.write(folder)


if __name__ == "__main__":
    print(synthetic(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10_000))
