"""A plug-in that spoils swaps: one slot of rank 0 keeps its expert, or a rank ends between two steps."""

import os
import signal


def register() -> None:
    from semmoe.live.swap import Swapper

    spoil = {"slot": keep_a_slot, "death": die_between_steps}[os.environ["UNMOVED"]]
    spoil(Swapper)


def keep_a_slot(swapper) -> None:
    move_layer = swapper._move_layer

    def spoilt(self, layer):
        move = self._experts.move

        def incomplete(layer, old, new):
            weights = self._experts.weights(layer)
            kept = [weight[0].clone() for weight in weights]
            move(layer, old, new)
            if self.status.rank == 0 and old[0] != new[0]:
                for weight, before in zip(weights, kept, strict=True):
                    weight[0].copy_(before)

        self._experts.move = incomplete
        move_layer(self, layer)

    swapper._move_layer = spoilt


def die_between_steps(swapper) -> None:
    step = swapper.step

    def last(self):
        if self.status.rank == 1 and self.status.layers_done:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self)

    swapper.step = last
