"""A game of several turns: the policy guesses a number and is told after each guess whether the number is higher or lower."""

from __future__ import annotations

import re

from vime.rollout.conversation import Conversation
from vime.rollout.generate import Context
from vime.sample import Sample, Task

GUESSES = 4


async def play(context: Context, task: Task) -> Sample:
    """One game. The number of guesses goes to the reward, as ``task.metadata["guesses"]``."""
    number = int(task.answer or "")
    talk = Conversation(context, task)
    for guesses in range(1, GUESSES + 1):
        guess = guess_in(await talk.respond(max_tokens=8))
        if guess == number or guesses == GUESSES or talk.truncated:
            break
        talk.append({"role": "user", "content": feedback(guess, number)})
    return talk.sample(guesses=guesses)


def guess_in(reply: str) -> int | None:
    found = re.search(r"\d+", reply)
    return int(found.group()) if found else None


def feedback(guess: int | None, number: int) -> str:
    if guess is None:
        return "That is no number. Reply with one number only."
    return f"My number is {'higher' if number > guess else 'lower'} than {guess}. Guess again."


def reward(task: Task, response: str) -> dict[str, float]:
    """1 for the number at the first guess, a fifth less for each further one; 0 where the last reply is not the number."""
    guesses, right = task.metadata["guesses"], guess_in(response) == int(task.answer or "")
    return {"reward": 1.0 - 0.2 * (guesses - 1) if right else 0.0, "found": float(right), "guesses": guesses}
