"""What the scheduler has to say to the front end, until somebody takes it.

Every message carries the version of the weights it was computed with: they change only while no
request runs, so one version holds for all of a request.
"""

from seawall.core.request import Request
from seawall.core.step import Scores
from seawall.core.wire import FinishReason, OutputDelta


class Outbox:
    """Messages in order. The scheduler writes them, the owner of the weights the version."""

    def __init__(self) -> None:
        self.weight_version = "default"
        self._messages: list[OutputDelta] = []

    def send(
        self,
        request: Request,
        *,
        output_ids: tuple[int, ...] = (),
        prompt_scores: Scores | None = None,
        output_scores: Scores | None = None,
        finish: FinishReason | None = None,
    ) -> None:
        """Add what one step gave to a request, or its end."""
        self._messages.append(
            OutputDelta(
                rid=request.rid,
                index=request.index,
                output_ids=output_ids,
                prompt_scores=prompt_scores,
                output_scores=output_scores,
                finish=finish,
                cached_tokens=request.cached_tokens,
                num_retractions=request.num_retractions,
                weight_version=self.weight_version,
            )
        )

    def take(self) -> list[OutputDelta]:
        """All messages since the last call."""
        messages, self._messages = self._messages, []
        return messages
