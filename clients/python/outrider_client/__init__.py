"""Client for Outrider: language model answers streamed over a WebSocket."""

from .client import AsyncClient
from .conversation import Conversation, message
from .errors import (
    ClientClosed,
    ConnectionFailed,
    ConnectionLimitReached,
    ConnectionLost,
    OutriderError,
    PreviousResponseNotFound,
    ProtocolError,
    RequestRefused,
    ResponseFailed,
    SlowConsumer,
)
from .events import (
    ContentPartEvent,
    DraftCounts,
    Drafts,
    Event,
    Metrics,
    OutputItemEvent,
    Response,
    ResponseEvent,
    SpeculativeDecoding,
    TextDelta,
    TextDone,
    Usage,
)
from .stream import ResponseStream
from .sync import Client, SyncConversation, SyncResponseStream

__all__ = [
    "AsyncClient",
    "Client",
    "ClientClosed",
    "ConnectionFailed",
    "ConnectionLimitReached",
    "ConnectionLost",
    "ContentPartEvent",
    "Conversation",
    "DraftCounts",
    "Drafts",
    "Event",
    "Metrics",
    "OutputItemEvent",
    "OutriderError",
    "PreviousResponseNotFound",
    "ProtocolError",
    "RequestRefused",
    "Response",
    "ResponseEvent",
    "ResponseFailed",
    "ResponseStream",
    "SlowConsumer",
    "SpeculativeDecoding",
    "SyncConversation",
    "SyncResponseStream",
    "TextDelta",
    "TextDone",
    "Usage",
    "message",
]
