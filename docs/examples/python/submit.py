"""Submit requests to a pool's queue and print their results, by the queue contract alone.

    python submit.py 'batch:{qwen}:requests' 600 < requests.jsonl

Each line of standard input is the body of a request, which is to be answered within 600 seconds. Each
result is printed as it comes: one line of JSON, with the request's id. Ctrl-C cancels what is pending.
REDIS_URL says where Redis is. Exit code 0: all were answered with a status below 400; 1: some were not; 2:
nothing was submitted.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from contextlib import suppress

from redis import ConnectionError as RedisConnectionError
from redis import Redis
from redis import TimeoutError as RedisTimeoutError

GRACE_S = 30  # a dispatcher answers what is past its deadline within seconds; without one, nobody does
ONE_CALL = 500  # requests


class Producer:
    """Submits to one queue, and awaits the results in a list of its own."""

    def __init__(self, redis: Redis, queue: str) -> None:
        self.redis, self.queue = redis, queue
        self.prefix = queue if "{" in queue else f"{{{queue}}}"
        self.run = secrets.token_hex(8)
        self.results = f"batch-results:{{{self.run}}}"
        self.pending: dict[str, str] = {}  # id -> token
        self.deadline = 0
        self._count = self._made = 0

    def submit(self, bodies: list[str], within_s: int) -> None:
        self.deadline = int(time.time()) + within_s
        for start in range(0, len(bodies), ONE_CALL):
            members = {self.member(body): self.deadline for body in bodies[start : start + ONE_CALL]}
            self.redis.zadd(self.queue, members)
            with suppress(RedisConnectionError, RedisTimeoutError):  # without it a dispatcher looks by itself
                self.redis.publish(f"{self.prefix}:wake", "work")

    def member(self, body: str) -> str:
        """`internal` stands first and the token first in it: requests of one deadline leave in this order.
        The body is put in as it is, so it reaches the model server byte for byte."""
        self._count += 1
        request_id, token = f"{self.run}-{self._count}", self.token()
        self.pending[request_id] = token
        internal = json.dumps({"request_token": token, "result_queue_name": self.results})
        head = f'"id":{json.dumps(request_id)},"created":{int(time.time())},"deadline":{self.deadline}'
        return f'{{"internal":{internal},"request_kind":"redis","data":{{{head},"payload":{body}}}}}'

    def token(self) -> str:
        """A time that only grows, for the order, and 128 random bits that nobody can guess."""
        self._made = max(self._made + 1, time.time_ns())
        return f"{self._made:016x}{secrets.token_hex(16)}"

    def next_result(self) -> dict[str, object] | None:
        """The next result of a request of ours; None: none came within a second."""
        popped = self.redis.brpop([self.results], timeout=1)
        if popped is None:
            return None
        result: dict[str, object] = json.loads(popped[1])
        token = self.pending.get(str(result.get("id")))
        if token is None or result.get("request_token") != token:
            return None  # whoever knows our list may write to it, but not with our token
        del self.pending[str(result["id"])]
        return result

    def cancel(self) -> None:
        """Ask for all that is pending to be cancelled. Each still gets a result: CANCELLED, or what came
        before."""
        ttl_s = max(1, self.deadline - int(time.time()))
        with self.redis.pipeline(transaction=False) as calls:
            for request_id, token in self.pending.items():
                calls.set(f"{self.prefix}:cancel:{request_id}:{token}", token, ex=ttl_s)
            calls.publish(f"{self.prefix}:wake", "cancel")
            calls.execute()


def main(queue: str, within_s: int) -> int:
    bodies = [line.strip() for line in sys.stdin if line.strip()]
    for number, body in enumerate(bodies, 1):
        if not is_object(body):
            print(f"line {number} is no JSON object; nothing was submitted", file=sys.stderr)
            return 2
    redis = Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"), decode_responses=True)
    producer = Producer(redis, queue)
    asked_to_end: list[int] = []

    def end(number: int, _: object) -> None:
        asked_to_end.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    producer.submit(bodies, within_s)
    failed, until, cancelled = 0, float(producer.deadline + GRACE_S), False
    while producer.pending and time.time() < until:
        try:
            if asked_to_end and not cancelled:
                producer.cancel()
                cancelled, until = True, min(until, time.time() + GRACE_S)
            result = producer.next_result()
        except (RedisConnectionError, RedisTimeoutError) as error:
            print(f"Redis is away: {error}", file=sys.stderr)
            time.sleep(1)
            continue
        if result is not None:
            print(json.dumps(result, ensure_ascii=False), flush=True)
            failed += "error_code" in result or int(str(result.get("status_code", 500))) >= 400
    for request_id in producer.pending:
        print(f"{request_id}: no result; does a dispatcher work on {queue}?", file=sys.stderr)
    redis.delete(producer.results)
    return 1 if failed or producer.pending else 0


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: submit.py QUEUE SECONDS < requests.jsonl")
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
