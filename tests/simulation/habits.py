"""What a world likes to do: drawn once, then the same to its end."""

import random


class Habits:
    """Rates and numbers of the disturbances of a world."""

    random: random.Random

    def _draw_habits(self) -> None:
        """How this world likes to behave."""
        draw = self.random
        self.switches = draw.choice([0.05, 0.3, 0.8])
        self.races = draw.choice([0, 4, 20])
        self.fault_rate = draw.choice([0.0, 0.01, 0.05, 0.15])
        self.faults = draw.randint(0, 20)
        self.restores = draw.choice([0, 0, 1, 2])
        self.restores_early = draw.choice([False, True])  # before anything has expired
        self.zombies = draw.choice([0, 3, 12])
        self.by_trigger_time = draw.choice([0.0, 0.5, 1.0])
        self.threads = draw.choice([1, 2])
        self.group_steps = draw.randint(1, 6)
        self.expire_least = draw.choice([1, 1, 2, 1 << 30])

    def splits(self, what: str) -> bool:
        """Whether a race begins at a part of a commit: not at one that is the whole."""
        return not what.endswith(" of 1") and self.random.random() < 0.5
