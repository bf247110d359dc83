"""Types of values with rules of their own: URLs that may contain a password, headers, paths, names of keys.

Error messages never repeat the value, because it may be a secret.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, PlainSerializer
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from dispatcher.requests.headers import (
    FAIRNESS_ID,
    FORBIDDEN_HEADERS,
    HOP_BY_HOP,
    INFERENCE_TTL,
    NAME,
    OBJECTIVE,
    OLD_FAIRNESS_ID,
    OLD_OBJECTIVE,
    REQUEST_ID,
    VALUE,
    normalize_name,
)
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES

MASK = "***"
CONTROL_HEADERS = {
    **dict.fromkeys((OBJECTIVE, OLD_OBJECTIVE), "set gateway.objective"),
    **dict.fromkeys((FAIRNESS_ID, OLD_FAIRNESS_ID), "set gateway.fairness_from"),
    INFERENCE_TTL: "set gateway.inference_ttl_s",
    REQUEST_ID: "it is the request's id",
    "content-length": "it follows from the payload",
    **dict.fromkeys(HOP_BY_HOP, "it belongs to the connection"),
}
"""Headers that no setting may set, because the dispatcher sets them or they concern the connection, with the
alternative."""
RESERVED_HEADERS = (
    FORBIDDEN_HEADERS | CONTROL_HEADERS.keys() | {"accept", "traceparent", "tracestate", "user-agent"}
)
"""Headers with a meaning of their own, which a setting cannot use for another purpose."""

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<netloc>[^/?#]*)(?P<path>[^?#]*)"
    r"(?:\?(?P<query>[^#]*))?(?:#(?P<fragment>.*))?",
    re.DOTALL,
)
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")
SECRET_NAME = re.compile(
    r"auth|token|key|secret|cookie|passw|passphrase|credential|signature|session|jwt"
    r"|(?:^|[^a-z0-9])(?:pwd?|pass|sig|sas|sid)(?:$|[^a-z0-9])",
    re.IGNORECASE,
)
"""Pattern of names whose values are probably secrets. The short words must be whole words: `X-Tenant-Pw`
matches, `X-Power` does not."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def setting_error(sentence: str) -> PydanticCustomError:
    """Return the error for a validator to raise. The sentence is shown unchanged."""
    return PydanticCustomError("refused", "{why}", {"why": sentence})


def is_secret_name(name: str) -> bool:
    """Return whether the value of a header or a query parameter with this name is probably a secret."""
    return SECRET_NAME.search(name) is not None


class SecretUrl:
    """URL whose password is shown only by `reveal()`. An empty URL is false."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    @property
    def scheme(self) -> str:
        return self._text.partition("://")[0].lower()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the URL, with their ports if the URL has any."""
        match = _URL.fullmatch(self._text)
        return tuple(match["netloc"].rpartition("@")[2].split(",")) if match else ()

    @property
    def credentials(self) -> tuple[str, str] | None:
        """Decoded user and password, or `None` if the URL has neither."""
        match = _URL.fullmatch(self._text)
        userinfo, at, _ = match["netloc"].rpartition("@") if match else ("", "", "")
        user, _, password = userinfo.partition(":")
        return (unquote(user), unquote(password)) if at else None

    @property
    def authorization_header(self) -> str:
        """Authorization header for user and password, or empty if the URL has neither."""
        given = self.credentials
        return "Basic " + base64.b64encode(":".join(given).encode()).decode() if given else ""

    @property
    def without_credentials(self) -> str:
        """URL without user and password."""
        match = _URL.fullmatch(self._text)
        if match is None:
            return self._text
        hosts = match["netloc"].rpartition("@")[2]
        return f"{match['scheme']}://{hosts}{self._text[match.end('netloc') :]}"

    def __str__(self) -> str:
        """Return the URL with secrets masked: `redis://:***@host`."""
        scheme, there, rest = self._text.partition("://")
        if not there:
            return MASK if "@" in self._text else self._text
        # Mask up to the last @, even after a slash: a password may contain characters that were not encoded.
        userinfo, at, tail = rest.rpartition("@")
        if at:
            user, colon, _ = userinfo.partition(":")
            has_user = colon and not re.search(r"[/?#]", user)
            rest = f"{user}:{MASK}@{tail}" if has_user else f"{MASK}@{tail}"
        path, mark, query = rest.partition("?")
        if mark:
            pairs = (pair.partition("=") for pair in query.split("&"))
            query = "&".join(
                f"{name}={MASK}" if is_secret_name(name) else name + eq + v for name, eq, v in pairs
            )
        return f"{scheme}://{path}{mark}{query}"

    def __repr__(self) -> str:
        return f"SecretUrl({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretUrl) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __bool__(self) -> bool:
        return bool(self._text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = core_schema.no_info_after_validator_function(cls, core_schema.str_schema(strict=True))
        return core_schema.union_schema(
            [core_schema.is_instance_schema(cls), text],
            mode="left_to_right",
            custom_error_type="refused",
            custom_error_message="{why}",
            custom_error_context={"why": "a URL is expected"},
            serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json"),
        )


AUTO = "auto"


def _auto_to_none(value: object) -> object:
    if isinstance(value, str):
        if value != AUTO:
            raise setting_error("a number or auto is expected")
        return None
    return value


AutoNumber = Annotated[
    float | None,
    BeforeValidator(_auto_to_none),
    PlainSerializer(lambda value: AUTO if value is None else value, when_used="json"),
    AUTO,
]
"""Number, or the word `auto`, which is read as `None`: the dispatcher determines the value."""

AutoCount = Annotated[
    int | None,
    BeforeValidator(_auto_to_none),
    PlainSerializer(lambda value: AUTO if value is None else value, when_used="json"),
    AUTO,
]
"""Whole number, or the word `auto`."""


@dataclass(frozen=True, slots=True)
class ValueNotation:
    """Annotation of a type without a plain notation: how its values are written."""

    text: str
    """Text for the reference documentation."""
    schema: Mapping[str, Any]
    """JSON Schema of the values."""


def url_validator(*schemes: str, hosts: int = 1) -> AfterValidator:
    """Return a validator for URLs with one of the schemes and up to `hosts` hosts. Empty URLs are valid."""

    def check_url(value: SecretUrl) -> SecretUrl:
        if not value:
            return value
        if (why := _url_fault(value, schemes, hosts)) is not None:
            raise setting_error(why)
        return value

    return AfterValidator(check_url)


def _url_fault(value: SecretUrl, schemes: tuple[str, ...], hosts: int) -> str | None:
    match = _URL.fullmatch(value.reveal())
    if match is None or value.scheme not in schemes:
        return "must begin with " + " or ".join(f"{scheme}://" for scheme in schemes)
    if re.search(r"[^\x21-\x7e]", value.reveal()):
        return "holds blanks, control or non-ASCII characters: percent-encode them"
    # A password with / ? or # that is not encoded ends the host too early, and leaves its @ in the path.
    if "@" in match["path"]:
        return "holds an @ after the host: percent-encode / ? # and @ in the password"
    if len(value.hosts) > hosts:
        return "names more than one host"
    for host in value.hosts:
        host_match = _HOST.fullmatch(host)
        if host_match is None:
            return "holds no valid host (percent-encode / ? # and @ in the password)"
        if host_match["port"] is not None and not 1 <= int(host_match["port"]) <= 65535:
            return "holds a port that is not between 1 and 65535"
    return None


def _check_no_controls(value: str) -> str:
    if _CONTROL.search(value):
        raise setting_error("must not hold line breaks or other control characters")
    return value


def _check_header_name(value: str) -> str:
    if NAME.fullmatch(value) is None:
        raise setting_error("is not a header name")
    return value


def _check_header_value(value: str) -> str:
    if VALUE.fullmatch(value) is None or value != value.strip():
        raise setting_error("must not hold control characters, nor blanks at its ends")
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        raise setting_error("holds characters that a header cannot carry") from None
    return value


def _check_label(value: str) -> str:
    if _LABEL.fullmatch(value) is None:
        raise setting_error(
            "must be a Kubernetes name: at most 63 of a-z, 0-9 and -, a letter or digit at both ends"
        )
    return value


def _check_path(value: str) -> str:
    if not value.startswith("/") or value.startswith("//"):
        raise setting_error("must begin with one /")
    if re.search(r"[^\x21-\x7e]|[?#\\]", value) or ".." in value.split("/"):
        raise setting_error("must be a plain path: no blanks, ?, #, \\ or ..")
    return value


def _check_key(value: str) -> str:
    if _CONTROL.search(value) or len(value) > 512:
        raise setting_error("must not hold control characters, nor more than 512 characters")
    return value


def check_model_name(name: str) -> str:
    """Return the name of a model if it is valid. Raises PydanticCustomError otherwise."""
    if not name or name != name.strip():
        raise setting_error("must not be empty, nor have blanks at its ends")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise setting_error("is not valid Unicode") from None
    if size > MAX_MODEL_NAME_BYTES:
        raise setting_error(f"must not be longer than {MAX_MODEL_NAME_BYTES} bytes")
    return name


Text = Annotated[str, AfterValidator(_check_no_controls)]
ModelName = Annotated[Text, AfterValidator(check_model_name)]
Label = Annotated[str, AfterValidator(_check_label)]
UrlPath = Annotated[str, AfterValidator(_check_path)]
Key = Annotated[str, AfterValidator(_check_key)]
HeaderValue = Annotated[str, AfterValidator(_check_header_value)]
Headers = dict[Annotated[str, AfterValidator(_check_header_name)], HeaderValue]


def mask_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers with the values of likely secrets masked."""
    return {name: MASK if is_secret_name(name) else value for name, value in headers.items()}


HttpUrl = Annotated[SecretUrl, url_validator("http", "https")]


def check_own_header(name: str) -> str:
    """Return the name of a header if a setting may use it for its own purpose. Empty names are valid. Raises
    PydanticCustomError otherwise."""
    if name and NAME.fullmatch(name) is None:
        raise setting_error("is not a header name")
    if normalize_name(name) in RESERVED_HEADERS:
        raise setting_error(f"{name} cannot be used for this: it has a meaning of its own")
    return name
