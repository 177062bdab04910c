"""flaxen train denoise --out RUN --model.preset … --data.train …"""

import dataclasses
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flaxen.cli.recipe import to_dict
from flaxen.cli.settings import Settings


@dataclass(frozen=True)
class TrainDenoise(Settings):
    """Pre-train T5, mT5 or ByT5 on plain text by span corruption."""

    recipe: Path | None = None
    """TOML file with settings; flags come before it. See recipes/."""
    print_config: bool = False
    """Print the resolved settings as TOML, which is a recipe, and stop."""
    quiet: bool = False
    """No progress on standard error."""

    def settings(self) -> dict[str, Any]:
        """What the run depends on, without what belongs to this call."""
        values = to_dict(dataclasses.replace(self, optimizer=self.optimizer.resolved()))
        return {name: value for name, value in values.items() if name not in ("recipe", "print_config", "quiet")}

    def run(self, given: set[str]) -> None:
        if self.print_config:
            import tomli_w

            print(tomli_w.dumps(self.settings()), end="")
            return
        from flaxen.cli.build import build
        from flaxen.train import tracking
        from flaxen.train.loop import train
        from flaxen.train.run import Run, check

        check(self.out, self.settings())  # before the work of reading the data
        tracking.check(self.tracking)
        built = build(self)
        # Weights that cannot be read must not leave a new directory behind; a run that goes on may not need them.
        model = None if (self.out / "config.toml").exists() else built.initial()
        with closing(Run(self.out, self.settings(), built.facts)) as run:
            initial = built.initial if model is None else lambda: model
            tracked = tracking.trackers(self.tracking, self.out, self.settings())
            train(run, built.stepper, built.abstract, initial, tracked, built.export, self.quiet)
