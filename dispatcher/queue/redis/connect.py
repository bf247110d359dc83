"""Client for the URL of a queue: standalone, Sentinel or Cluster, with or without TLS.

    redis://[user:password@]host[:port][/db]            rediss:// with TLS
    unix:///path/to/socket[?db=0]
    redis+sentinel://[user:password@]h1[:26379],h2,h3/name[/db]     rediss+sentinel:// with TLS
    redis+cluster://[user:password@]h1[:6379],h2,h3     rediss+cluster:// with TLS

Query parameters are those of redis-py (`ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_cert_reqs` …), and
`sentinel_username` and `sentinel_password` if the sentinels have their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from redis import exceptions as errors
from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import URL_QUERY_ARGUMENT_PARSERS, ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff


class QueueUrlError(ValueError):
    """Error for an invalid `queue.url`. The message says what is wrong, without the password."""


@dataclass(frozen=True)
class _ParsedUrl:
    """Parts of a URL with several hosts."""

    kind: str
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    path: str
    options: dict[str, Any]
    sentinel: dict[str, Any]


_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(\w+)'")
_MAX_URL_CHARS = 8192
_PORTS = {"": 6379, "cluster": 6379, "sentinel": 26379}


def connect(
    url: str, *, connect_timeout_s: float = 1.5, response_timeout_s: float = 60.0, **options: Any
) -> Redis | RedisCluster:
    """Return a client for the URL. The client connects when it is first used. Its callers retry calls and
    limit their time (scripts.py); `response_timeout_s` only ends abandoned calls.

    Raises QueueUrlError for a URL that names no server, and for an unknown option.
    """
    with _as_queue_url_error(url):
        client = _create_client(url, connect_timeout_s, response_timeout_s, options)
        if isinstance(client, Redis):  # a Cluster has checked its options already
            pool = client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # opens no connection, but checks the options
        return client


def describe_address(url: str) -> str:
    """Return the address in a URL, without user and password. Raises QueueUrlError like `connect`."""
    parts = _split_url(url)
    return parts.netloc.rpartition("@")[2] or parts.path


@contextmanager
def _as_queue_url_error(url: str) -> Iterator[None]:
    """Translate every error about a URL into a QueueUrlError, without anything that may be part of its
    password."""
    try:
        yield
    except QueueUrlError:
        raise
    except (
        *(TypeError, ValueError, AttributeError, OSError),
        *(errors.RedisError, errors.RedisClusterException),
    ) as error:
        raise QueueUrlError(f"queue.url: {_describe_url_error(error, url)}") from None


def _describe_url_error(error: Exception, url: str) -> str:
    message = str(error)
    if (found := _UNKNOWN_OPTION.search(message)) is not None:
        return (
            f"{found[1]} is not an option of a connection (known options are those of redis-py, such as "
            "ssl_ca_certs)"
        )
    # An error that repeats any part of user and password is replaced by a general one.
    userinfo = url.partition("://")[2].rpartition("@")[0]
    parts = [part for part in re.split(r"[:/?#@\[\]]", userinfo) if part]
    if not message or any(part in message for part in parts):
        return "it cannot be read: write special characters of a user or a password as %XX"
    return message


def _create_client(
    url: str, connect_timeout_s: float, response_timeout_s: float, options: dict[str, Any]
) -> Redis | RedisCluster:
    settings: dict[str, Any] = {
        "socket_connect_timeout": connect_timeout_s,
        "socket_timeout": response_timeout_s,
        "socket_keepalive": True,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),  # the callers retry, within a time of their own
        **options,
    }
    parts = _split_url(url)
    if parts.scheme in ("redis", "rediss", "unix"):
        if parts.scheme == "unix":
            del settings["socket_keepalive"]  # an option of TCP
        return Redis.from_pool(ConnectionPool.from_url(url, **settings))
    target = _parse_hosts_url(parts)
    settings |= target.options
    if target.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in target.hosts]
        if target.path:
            raise QueueUrlError("queue.url: a cluster has no database numbers, so no path either")
        return RedisCluster(startup_nodes=nodes, ssl=target.tls, **settings)
    name, _, db = target.path.partition("/")
    if not name or not (db or "0").isdigit():
        raise QueueUrlError("queue.url: redis+sentinel://hosts/<name of the primary>[/<db number>]")
    # User and password of the URL are those of the primary. Sentinels have their own, or none.
    sentinel_settings = {
        key: value for key, value in settings.items() if not key.startswith(("username", "password"))
    }
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        list(target.hosts),
        sentinel_kwargs={**sentinel_settings, **target.sentinel, "ssl": target.tls},
    )
    pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        name, sentinel, is_master=True, ssl=target.tls, db=int(db or "0"), **settings
    )
    return Redis.from_pool(pool)


def _split_url(url: str) -> SplitResult:
    """Return the parts of a URL, if it can be read in one way only. A refused part is not repeated in the
    message, because it may be a password that was not encoded."""
    if len(url) > _MAX_URL_CHARS:
        raise QueueUrlError(f"queue.url: longer than {_MAX_URL_CHARS} characters")
    try:
        parts = urlsplit(url)
        if "+" not in parts.scheme:
            _ = parts.port
    except ValueError:
        why = "a port that is no number, or a [ that is no address"
    else:
        has_misplaced_at = "@" in parts.path + parts.fragment or (
            "@" in parts.query and "@" not in parts.netloc
        )
        if not has_misplaced_at:
            return parts
        why = "an @ after the host"
    raise QueueUrlError(f"queue.url: holds {why}: percent-encode / ? # [ ] and @ in user and password")


def _parse_option(name: str, value: str) -> Any:
    """Parse an option as redis-py does for the URL of one server."""
    parser: Callable[[str], Any] | None = URL_QUERY_ARGUMENT_PARSERS.get(name)
    try:
        return value if parser is None else parser(value)
    except ValueError as error:
        raise QueueUrlError(f"queue.url: invalid value for {name}") from error


def _parse_hosts_url(parts: SplitResult) -> _ParsedUrl:
    security, _, kind = parts.scheme.partition("+")
    if security not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
        raise QueueUrlError(
            "queue.url: unknown scheme: redis, rediss, unix, redis+sentinel, redis+cluster are known"
        )
    userinfo, _, hostlist = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    hosts = []
    for number, host in enumerate(hostlist.split(","), start=1):
        name, colon, port = host.rpartition(":")
        if not colon or host.endswith("]"):
            name, port = host, str(_PORTS[kind])
        if not name or not (port.isdecimal() and len(port) <= 5 and int(port) <= 65_535):
            raise QueueUrlError(f"queue.url: host {number} is no host:port")  # it may be a password
        hosts.append((name.strip("[]"), int(port)))
    options = {key: _parse_option(key, values[-1]) for key, values in parse_qs(parts.query).items()}
    sentinel = {
        key.removeprefix("sentinel_"): options.pop(key)
        for key in ("sentinel_username", "sentinel_password")
        if key in options
    }
    if username:
        options["username"] = unquote(username)
    if password:
        options["password"] = unquote(password)
    return _ParsedUrl(kind, security == "rediss", tuple(hosts), parts.path.strip("/"), options, sentinel)
