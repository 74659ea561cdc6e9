"""The request router of Ray Serve: it knows each replica's cached prefixes and sends requests where they cost least.

An order that names its replica goes there, or fails with `ReplicaGone`. attar's HTTP process names one, because it has
scored the replicas itself (`fleet.py`), knows which of them may continue an answer, and which request may have ended an
engine. Orders of other handles name none. For these the scorer chooses, by the same costs.

Serve makes one router for each handle, in the process and the loop of the handle's router. The router watches every
replica. A `Fleet` of the same process hears what it hears. Serve pickles this class by value. So what it shares with
the rest of the process is in another module.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from attar.integrations.ray import fleet, wire
from attar.integrations.ray.scorer import Scorer
from attar.integrations.ray.wire import Told
from attar.protocol.messages import Embed, Submit

ANSWERS, STATUS, WATCH = ("answer", "whole"), "status", "watch"  # methods of a replica
AGAIN_SECONDS = 0.2  # until a watch that broke is begun again

logger = logging.getLogger(__name__)


class CostRouter(RequestRouter):  # type: ignore[misc]
    """The request router of a deployment of engines."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Begin with no replica known."""
        self._scorer = Scorer()
        self._watches: dict[str, asyncio.Task[None]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the present replicas, and watch new ones. One that is gone is watched until a listener lets it go."""
        super().update_replicas(replicas)
        present = {each.replica_id.unique_id: each for each in replicas}
        for id, replica in present.items():
            if id not in self._watches:
                self._watches[id] = self._event_loop.create_task(self._watch(id, replica))
        for id in self._watches.keys() - present.keys():
            self._scorer.lose(id)
            if self._listener is None:
                self._watches[id].cancel()
        if (listener := self._listener) is not None:
            listener.known(frozenset(present), {id: task.cancel for id, task in self._watches.items()})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica that a request names, else that of the least cost; all of them for requests that are no
        orders, and none where no replica has room, so that Serve asks again."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Serve asks again without a pause
        method, args = pending_request.metadata.call_method, pending_request.args
        command: Submit | Embed | None = None
        if method in ANSWERS:
            try:
                order = wire.order(args[0])
            except Exception as error:
                return self._fail(pending_request, error, candidate_replicas)
            command, named = order.command, order.replica
        elif method == STATUS:
            named = str(args[0])
        else:
            return [candidate_replicas]
        present = {each.replica_id.unique_id: each for each in candidate_replicas}
        if named:
            if named not in present:
                return self._fail(pending_request, fleet.ReplicaGone(named), candidate_replicas)
            return [[present[named]]]
        if command is None:
            return self._fail(pending_request, fleet.ReplicaGone("a replica must be named"), candidate_replicas)
        request = pending_request.metadata.internal_request_id
        chosen = self._scorer.choose(request, command, present.keys(), time.monotonic())
        return [[present[chosen]]] if chosen is not None else []

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended."""
        self._scorer.ended(internal_request_id)

    @property
    def _listener(self) -> fleet.Listener | None:
        return fleet.LISTENERS.get(self._deployment_id.name)

    def _fail(
        self, request: PendingRequest, error: Exception, candidates: list[RunningReplica]
    ) -> list[list[RunningReplica]]:
        """End a request that can be sent nowhere. Serve leaves off once it looks at its future, with a candidate."""
        if not request.future.done():
            request.future.set_exception(error)
        return [candidates]

    async def _watch(self, id: str, replica: RunningReplica) -> None:
        """Hear a replica for as long as it is there, or a listener wants it."""
        name = str(uuid.uuid4())
        try:
            while True:
                try:
                    await self._hear(id, replica, name)
                    continue  # a watch is a lease
                except asyncio.CancelledError:
                    raise
                except Exception as error:
                    logger.info("replica %s is not heard: %s", id, type(error).__name__)
                self._tell(id, Told(lost=True))
                if id not in self._present:
                    return
                name = str(uuid.uuid4())
                await asyncio.sleep(AGAIN_SECONDS)
        finally:
            self._tell(id, Told(lost=True))
            self._watches.pop(id, None)

    async def _hear(self, id: str, replica: RunningReplica, name: str) -> None:
        call = str(uuid.uuid4())
        metadata = RequestMetadata(request_id=call, internal_request_id=call, call_method=WATCH, is_streaming=True)
        request = PendingRequest(args=[name], kwargs={}, metadata=metadata)
        result = replica.try_send_request(request, with_rejection=False)
        try:
            while True:
                self._tell(id, wire.told(await result.__anext__()))
        except StopAsyncIteration:
            return
        except BaseException:
            result.cancel()
            raise

    def _tell(self, id: str, told: Told) -> None:
        if id in self._present:  # others get no new requests
            self._scorer.hear(id, told)
        if (listener := self._listener) is not None:
            listener.told(id, told)

    @property
    def _present(self) -> Sequence[str]:
        return [each.unique_id for each in self.curr_replicas]
