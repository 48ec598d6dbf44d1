"""The life of a connection's responses, from their place in a lane to the end."""

from __future__ import annotations

import dataclasses
from collections import deque

from outrider.server.engine.request import FinishReason, Request, StepOutput
from outrider.server.protocol.actions import Action, Cancel, Prepare, Submit
from outrider.server.protocol.errors import ErrorCode, ProtocolError, show
from outrider.server.protocol.items import Message
from outrider.server.protocol.lanes import Lane, Lanes, Turn, TurnState
from outrider.server.protocol.outbox import Outbox
from outrider.server.protocol.prompt import BuiltPrompt, PromptError
from outrider.server.protocol.store import StoredResponse
from outrider.server.protocol.surroundings import ConnectionLimits, Surroundings

_MAX_RECENT_IDS = 256


class Turns:
    """All turns of one connection. ``settle`` after each change starts what can start.

    A turn is refused when its lane comes to it, never before: an error that overtook the lane's running
    response would be taken for that response's end.
    """

    def __init__(self, surroundings: Surroundings, limits: ConnectionLimits, outbox: Outbox, tenant: str) -> None:
        self.lanes = Lanes(limits.max_streams)
        self.actions: deque[Action] = deque()
        self.draining = False
        self.num_in_flight = 0
        self._around = surroundings
        self._limits = limits
        self._outbox = outbox
        self._tenant = tenant
        self._active: dict[str, Turn] = {}  # all but the queued turns, by response id
        self._waiting: deque[Turn] = deque()
        self._recent_ids: deque[str] = deque(maxlen=_MAX_RECENT_IDS)

    def add(self, turn: Turn) -> None:
        """Put a turn at the end of its lane.

        Raises:
            ProtocolError: too many are queued.
        """
        if turn.lane.turns and self.lanes.num_queued >= self._limits.max_queued:
            message = f"{self._limits.max_queued} responses are queued on this connection; wait until some have ended."
            raise ProtocolError(ErrorCode.QUEUE_FULL, message)
        turn.lane.turns.append(turn)

    def active(self, response_id: str) -> Turn | None:
        return self._active.get(response_id)

    def has_ended(self, response_id: str) -> bool:
        """Whether this is the id of a response that is over, as far as anyone remembers."""
        return response_id in self._recent_ids or self._find(response_id) is not None

    def settle(self, *lanes: Lane) -> None:
        for lane in lanes:
            while lane.turns and lane.turns[0].state is TurnState.QUEUED:
                self._start(lane.turns[0])
        while self._waiting and self.num_in_flight < self._limits.max_in_flight:
            self._submit(self._waiting.popleft())

    def keep_alive(self) -> None:
        now = self._around.clock()
        for turn in self._active.values():
            stream = turn.stream
            if stream.announced and now - stream.last_event_at >= self._limits.keep_alive_s:
                stream.keep_alive(now)

    # -- answers to actions, and the engine --

    def receive_prompt(self, response_id: str, prompt: BuiltPrompt | PromptError) -> None:
        turn = self._active.get(response_id)
        if turn is None or turn.state is not TurnState.PREPARING:
            return  # cancelled meanwhile
        try:
            if isinstance(prompt, PromptError):
                message = f"'input' cannot be made into a prompt: {str(prompt)[:300]}"
                raise ProtocolError(ErrorCode.INVALID_PROMPT, message, "input")
            self._enter(turn, prompt)
        except ProtocolError as error:
            self._end_with_error(turn, error)
        self.settle(turn.lane)

    def receive_admission(self, request_id: str) -> None:
        turn = self._active.get(request_id)
        if turn is not None and turn.state is TurnState.SUBMITTED:
            self._run(turn)

    def receive_refusal(self, request_id: str, error: ProtocolError) -> None:
        turn = self._active.get(request_id)
        if turn is not None and turn.state is TurnState.SUBMITTED:
            self._end_with_error(turn, error)
            self.settle(turn.lane)

    def receive_output(self, output: StepOutput) -> None:
        turn = self._active.get(output.request_id)
        if turn is None:
            return
        self.receive_admission(output.request_id)  # an output says so too
        now = self._around.clock()
        turn.stream.output(output, now)
        if output.finish_reason is None:
            return
        turn.stream.finish(output.finish_reason, output.error, now)
        if output.finish_reason is FinishReason.ERROR:
            self._evict_previous(turn)
        else:
            self._remember(turn)
        self._remove(turn)
        self.settle(turn.lane)

    # -- cancelling --

    def cancel_all(self) -> None:
        for lane in self.lanes:
            self.cancel_lane(lane)

    def cancel_lane(self, lane: Lane) -> None:
        # The active turn last: its end starts the next one.
        for turn in reversed(list(lane.turns)):
            self.cancel(turn)

    def cancel(self, turn: Turn) -> None:
        if turn.cancelled:
            return
        turn.cancelled = True
        match turn.state:
            case TurnState.QUEUED:
                return  # ends when its lane comes to it
            case TurnState.SUBMITTED | TurnState.RUNNING:
                self.actions.append(Cancel(turn.response_id))
                return
            case TurnState.WAITING:
                self._waiting.remove(turn)
            case TurnState.PREPARING:
                pass
        self._finish_cancelled(turn)
        self._remember(turn)
        self._remove(turn)
        self.settle(turn.lane)

    # -- steps of a turn's life --

    def _start(self, turn: Turn) -> None:
        """A queued turn is now the first of its lane."""
        if turn.refusal is not None:
            self._end_with_error(turn, turn.refusal)
        elif turn.cancelled:
            self._finish_cancelled(turn)
            self._remove(turn)
        elif self.draining:
            self._end_with_error(turn, shutting_down())
        else:
            self._prepare(turn)

    def _prepare(self, turn: Turn) -> None:
        create = turn.create
        if create.previous_response_id is not None:
            turn.previous = self._find(create.previous_response_id)
            if turn.previous is None:
                message = f"Previous response with id {show(create.previous_response_id)} not found."
                error = ProtocolError(ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND, message, "previous_response_id")
                self._end_with_error(turn, error)
                return
        messages = create.messages
        if turn.previous is not None:
            messages = turn.previous.messages + messages
        if create.instructions is not None:
            messages = (Message(role="system", content=create.instructions), *messages)
        turn.state = TurnState.PREPARING
        self._active[turn.response_id] = turn
        self.actions.append(Prepare(turn.response_id, messages, create.prediction))

    def _enter(self, turn: Turn, prompt: BuiltPrompt) -> None:
        """The prompt stands: hand it to the engine, or wait for a place.

        Raises:
            ProtocolError: it does not fit into the model's context.
        """
        model = self._around.model()
        if model is None:
            raise engine_not_ready()
        create, stream = turn.create, turn.stream
        num_prompt = len(prompt.token_ids)
        room = model.max_context - num_prompt
        if room < create.generate:
            message = (
                f"The input has {num_prompt} tokens, but this model's context holds {model.max_context}, "
                "answer included. Shorten the input."
            )
            raise ProtocolError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, "input")
        max_tokens = min(create.params.max_tokens, max(room, 1))
        min_tokens = min(create.params.min_tokens, max_tokens)
        params = dataclasses.replace(create.params, max_tokens=max_tokens, min_tokens=min_tokens)
        turn.request = Request(
            turn.response_id,
            prompt.token_ids,
            params,
            tenant=self._tenant,
            generate=create.generate,
            prediction_token_ids=prompt.prediction_token_ids[: model.max_context],  # no answer is longer
        )
        stream.metrics.num_prompt_tokens = num_prompt
        if self.num_in_flight < self._limits.max_in_flight:
            self._submit(turn)
        else:
            turn.state = TurnState.WAITING
            self._waiting.append(turn)
            stream.announce(self._around.clock(), queued=True)

    def _submit(self, turn: Turn) -> None:
        assert turn.request is not None
        turn.state = TurnState.SUBMITTED
        self.num_in_flight += 1
        self.actions.append(Submit(turn.request))

    def _run(self, turn: Turn) -> None:
        turn.state = TurnState.RUNNING
        now = self._around.clock()
        turn.stream.metrics.submitted_at = now
        if not turn.stream.announced:
            turn.stream.announce(now)
        turn.stream.start(now)

    def _finish_cancelled(self, turn: Turn) -> None:
        """The client's side of a turn that the engine never saw."""
        now = self._around.clock()
        if not turn.stream.announced:
            turn.stream.announce(now)
        turn.stream.finish(FinishReason.CANCELLED, None, now)

    def _end_with_error(self, turn: Turn, error: ProtocolError) -> None:
        """Refuse a turn. One that was announced gets its terminal event too."""
        self._outbox.put(error.event(turn.lane.stream_id))
        if turn.refusal is None and turn.stream.announced:
            turn.stream.finish(FinishReason.ERROR, error.message, self._around.clock())
        self._evict_previous(turn)
        self._remove(turn)

    def _remove(self, turn: Turn) -> None:
        turn.lane.turns.remove(turn)
        self._active.pop(turn.response_id, None)
        self._recent_ids.append(turn.response_id)
        if turn.state in (TurnState.SUBMITTED, TurnState.RUNNING):
            self.num_in_flight -= 1

    # -- what can be continued --

    def _find(self, response_id: str) -> StoredResponse | None:
        return self.lanes.latest(response_id) or self._around.store.get(self._tenant, response_id)

    def _remember(self, turn: Turn) -> None:
        stored = StoredResponse.following(turn.previous, turn.response_id, turn.stream.messages)
        turn.lane.latest = stored
        if turn.create.store:
            self._around.store.put(self._tenant, stored)

    def _evict_previous(self, turn: Turn) -> None:
        """A failed continuation takes its parent out of its own lane; a failed fork leaves it in the other."""
        latest = turn.lane.latest
        if latest is not None and latest.response_id == turn.previous_response_id:
            turn.lane.latest = None


def shutting_down() -> ProtocolError:
    return ProtocolError(ErrorCode.SERVER_SHUTTING_DOWN, "The server is shutting down; connect again in a moment.")


def engine_not_ready() -> ProtocolError:
    return ProtocolError(ErrorCode.ENGINE_UNAVAILABLE, "The engine is not ready; try again in a moment.")
