"""One client's connection, without the socket.

In: the client's messages (``receive_text``, ``receive_bytes``), the answers to actions (``receive_prompt``,
``receive_admission``, ``receive_refusal``), the engine's outputs (``receive_output``), the clock (``tick``) and
the end (``connection_lost``). Out: frames (``next_frame``), actions (``next_action``) and at last ``close``.
Whoever drives it performs all actions after each call, in order, and sends frames when the socket takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.server.engine.request import StepOutput
from outrider.server.protocol import events
from outrider.server.protocol.actions import GOING_AWAY, TRY_AGAIN_LATER, Action, Close
from outrider.server.protocol.errors import ErrorCode, ProtocolError, show
from outrider.server.protocol.fields import wrong_value
from outrider.server.protocol.frames import decode
from outrider.server.protocol.lanes import Turn
from outrider.server.protocol.metrics_block import ResponseMetrics
from outrider.server.protocol.outbox import Outbox
from outrider.server.protocol.parse import CreateRequest, parse_cancel, parse_create, parse_steer, parse_stream_id
from outrider.server.protocol.prompt import BuiltPrompt, PromptError
from outrider.server.protocol.response_stream import ResponseStream
from outrider.server.protocol.surroundings import ConnectionLimits, Surroundings
from outrider.server.protocol.turns import Turns, engine_not_ready, shutting_down


class ResponsesConnection:
    """The server's side of one Responses WebSocket.

    Args:
        tenant: whose conversations and cached pages this connection may use.
    """

    def __init__(self, surroundings: Surroundings, limits: ConnectionLimits | None = None, *, tenant: str = "") -> None:
        self.close: Close | None = None  # set once; frames that still wait go first
        self._around = surroundings
        self._limits = limits or ConnectionLimits()
        self._outbox = Outbox(self._limits.max_outbox_bytes)
        self._turns = Turns(surroundings, self._limits, self._outbox, tenant)
        self._opened_at = surroundings.clock()
        self._muted = False  # nobody reads any more: what still happens is only counted

    def next_frame(self) -> str | None:
        return self._outbox.pop()

    def next_action(self) -> Action | None:
        return self._turns.actions.popleft() if self._turns.actions else None

    @property
    def has_frames(self) -> bool:
        return len(self._outbox) > 0

    @property
    def num_in_flight(self) -> int:
        return self._turns.num_in_flight

    # -- the client --

    def receive_bytes(self, data: bytes) -> None:
        """A binary message is taken for the text it holds."""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            message = f"The binary message is not UTF-8 text (byte {error.start}); send JSON as a text message."
            with self._change():
                self._refuse(ProtocolError(ErrorCode.INVALID_JSON, message), None)
        else:
            self.receive_text(text)

    def receive_text(self, text: str) -> None:
        if self.close is not None or self._muted:
            return
        stream_id = None
        with self._change():
            try:
                self._check_size(text)
                event = decode(text)
                stream_id = parse_stream_id(event)
                self._dispatch(event, stream_id)
            except ProtocolError as error:
                self._refuse(error, stream_id)

    def connection_lost(self) -> None:
        """The client is gone: everything of it is cancelled."""
        with self._change():
            self._mute()

    # -- answers to actions, and the engine --

    def receive_prompt(self, response_id: str, prompt: BuiltPrompt | PromptError) -> None:
        with self._change():
            self._turns.receive_prompt(response_id, prompt)

    def receive_admission(self, request_id: str) -> None:
        """The engine took the request."""
        with self._change():
            self._turns.receive_admission(request_id)

    def receive_refusal(self, request_id: str, error: ProtocolError) -> None:
        """The engine did not take the request."""
        with self._change():
            self._turns.receive_refusal(request_id, error)

    def receive_output(self, output: StepOutput) -> None:
        with self._change():
            self._turns.receive_output(output)

    # -- the server --

    def tick(self) -> None:
        """Keep silent responses alive, and close a connection that is too old. Call about once a second."""
        with self._change():
            self._turns.keep_alive()

    def drain(self) -> None:
        """The server is stopping: finish what runs, refuse the rest, then close."""
        with self._change():
            self._turns.draining = True

    def cancel_all(self) -> None:
        with self._change():
            self._turns.cancel_all()

    # -- within --

    @contextmanager
    def _change(self) -> Iterator[None]:
        """What follows from any change: too slow a client, or the connection's time to go."""
        yield
        if self._outbox.overflowed and not self._muted:
            self.close = Close(TRY_AGAIN_LATER, "client reads too slowly")
            self._mute()
        if self._muted:
            self._outbox.clear()
        elif self.close is None and self._turns.lanes.idle:
            self._close_if_due()

    def _close_if_due(self) -> None:
        if self._turns.draining:
            self.close = Close(GOING_AWAY, "server is shutting down")
        elif self._is_too_old:
            self._refuse(self._too_old(), None)
            self.close = Close(GOING_AWAY, "connection is too old")

    def _mute(self) -> None:
        self._muted = True
        self._turns.cancel_all()

    def _check_size(self, text: str) -> None:
        limit = self._limits.max_message_bytes
        if len(text) <= limit // 4:  # a character has four bytes at most
            return
        num_bytes = len(text.encode())
        if num_bytes > limit:
            message = f"The message has {num_bytes} bytes; at most {limit} are allowed. Send less input at once."
            raise ProtocolError(ErrorCode.MESSAGE_TOO_LARGE, message)

    def _dispatch(self, event: dict[str, Any], stream_id: str | None) -> None:
        match event.get("type"):
            case "response.create":
                self._create(event, stream_id)
            case "response.cancel":
                self._cancel(event, stream_id)
            case "response.steer":
                self._steer(event, stream_id)
            case None:
                message = "'type' is missing: send response.create or response.cancel."
                raise ProtocolError(ErrorCode.MISSING_REQUIRED_PARAMETER, message, "type")
            case kind:
                message = f"Unknown event type {show(kind)}; send response.create or response.cancel."
                raise ProtocolError(ErrorCode.UNKNOWN_EVENT_TYPE, message, "type")

    def _create(self, event: dict[str, Any], stream_id: str | None) -> None:
        lane = self._turns.lanes.open(stream_id)
        previous_response_id = event.get("previous_response_id")
        turn = Turn(
            lane,
            response_id=f"resp_{self._around.new_id()}",
            previous_response_id=previous_response_id if isinstance(previous_response_id, str) else None,
        )
        try:
            turn.content = self._open_response(event, turn.response_id, stream_id)
        except ProtocolError as error:
            turn.refusal = error
        self._turns.add(turn)
        self._turns.settle(lane)

    def _open_response(
        self, event: dict[str, Any], response_id: str, stream_id: str | None
    ) -> tuple[CreateRequest, ResponseStream]:
        around = self._around
        if self._turns.draining:
            raise shutting_down()
        if self._is_too_old:
            raise self._too_old()
        model = around.model()
        if model is None:
            raise engine_not_ready()
        create = parse_create(event, model, around.new_seed())
        asked = create.params.max_draft_tokens
        max_draft_tokens = model.max_draft_tokens if asked is None else min(asked, model.max_draft_tokens)
        stream = ResponseStream(
            response_id,
            f"msg_{around.new_id()}",
            stream_id,
            create,
            created_at=int(around.wall_clock()),
            metrics=ResponseMetrics(around.clock(), max_draft_tokens, around.observer),
            prompts=around.prompts,
            outbox=self._outbox,
        )
        return create, stream

    def _cancel(self, event: dict[str, Any], stream_id: str | None) -> None:
        response_id = parse_cancel(event).response_id
        if response_id is None:
            lane = self._turns.lanes.get(stream_id)
            if lane is None:
                message = f"No response was ever created on the stream {show(stream_id)}."
                raise ProtocolError(ErrorCode.RESPONSE_NOT_FOUND, message, "stream_id")
            self._turns.cancel_lane(lane)
            return
        turn = self._turns.active(response_id)
        if turn is None:
            if not self._turns.has_ended(response_id):
                message = f"Response with id {show(response_id)} not found."
                raise ProtocolError(ErrorCode.RESPONSE_NOT_FOUND, message, "response_id")
            return  # the client could not know that it has just ended
        if stream_id is not None and stream_id != turn.lane.stream_id:
            raise wrong_value("stream_id", "the stream of the response, or absent", stream_id)
        self._turns.cancel(turn)

    def _steer(self, event: dict[str, Any], stream_id: str | None) -> None:
        steer = parse_steer(event)
        echo = {"previous_response_id": steer.previous_response_id, "input": steer.input}
        turn = self._turns.active(steer.previous_response_id)
        if turn is not None and turn.stream.announced:
            turn.stream.steer_failed(echo, self._around.clock())
        else:
            self._outbox.put(events.numbered(events.steer_failed(echo), 0, stream_id))

    def _refuse(self, error: ProtocolError, stream_id: str | None) -> None:
        self._outbox.put(error.event(stream_id))

    @property
    def _is_too_old(self) -> bool:
        return self._around.clock() - self._opened_at >= self._limits.max_age_s

    def _too_old(self) -> ProtocolError:
        age = f"{self._limits.max_age_s / 60:g} minutes"
        message = (
            f"Responses websocket connection limit reached ({age}). Create a new websocket connection to continue."
        )
        return ProtocolError(ErrorCode.CONNECTION_LIMIT_REACHED, message)
