"""Contents out of `data:` URLs (RFC 2397), gzip, and the hash that proves them.

As strict as the decoder that Ignition and the MCD use (vincent-petithory/dataurl, lex.go): what one agent would refuse
at install time the other must not accept later.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from urllib.parse import unquote_to_bytes

_TOKEN = r"[!#$%&'*+.0-9A-Z^_`a-z{|}~-]+"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_HEADER = re.compile(
    rf"data:(?:{_TOKEN}/{_TOKEN})?(?:;{_TOKEN}=(?:{_TOKEN}|{_QUOTED}))*(?P<base64>;base64)?,", re.ASCII | re.DOTALL
)
# Everything that may not stand in a URL without being escaped (lex.go:isURLCharRune).
_UNESCAPED = re.compile(r'[^\x21-\x7e]|[<>#"{}|\\^\[\]`]')
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}", re.ASCII)
_HASH = re.compile(r"(sha256|sha512)-([0-9a-fA-F]+)", re.ASCII)
_CHUNK = 1024 * 1024


class Undecodable(ValueError):
    """The text cannot be decoded; the message says why and never holds any of the content."""


def decode(url: str, limit: int) -> bytes:
    """The bytes of a data URL, percent-encoded or base64, at most `limit` bytes.

    The media type and its parameters (charset, …) are only checked for their form: bytes are never converted.
    Raises Undecodable, also for every other scheme, because a node must not fetch a file while it is being updated.
    """
    if not url.startswith("data:"):
        scheme = url.partition(":")[0][:20] if ":" in url else ""
        raise Undecodable(f"only data: URLs can be used, not {scheme}:" if scheme else "not a data: URL")
    header = _HEADER.match(url)
    if header is None:
        raise Undecodable("the data: URL has no valid media type, or no comma before the data")
    data = url[header.end() :]
    content = _base64(data, limit) if header.group("base64") else _percent(data)
    if len(content) > limit:
        raise Undecodable(f"larger than {limit} bytes")
    return content


def _percent(data: str) -> bytes:
    unescaped = _UNESCAPED.search(data)
    if unescaped:
        code = ord(unescaped.group())
        raise Undecodable(f"character {unescaped.start() + 1} of the data (U+{code:04X}) has to be percent-encoded")
    broken = _BROKEN_ESCAPE.search(data)
    if broken:
        raise Undecodable(f"the percent escape at character {broken.start() + 1} of the data is not two hex digits")
    return unquote_to_bytes(data)


def _base64(data: str, limit: int) -> bytes:
    if not _BASE64.fullmatch(data) or len(data) % 4:
        raise Undecodable("not valid base64 (standard alphabet, padded, no line breaks)")
    if len(data) // 4 * 3 - 2 > limit:
        raise Undecodable(f"larger than {limit} bytes")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise Undecodable("not valid base64 (standard alphabet, padded, no line breaks)") from error


def gunzip(data: bytes, limit: int) -> bytes:
    """Decompress gzip (one or more members, as Go's reader does), at most `limit` bytes.

    Raises Undecodable for truncated data, wrong checksums, anything behind the end (FILE-02), and too much.
    """
    parts: list[bytes] = []
    size = 0
    while data or not parts:
        member = zlib.decompressobj(wbits=31)
        try:
            while not member.eof:
                part = member.decompress(data, min(_CHUNK, limit - size + 1))
                data = member.unconsumed_tail
                size += len(part)
                if size > limit:
                    raise Undecodable(f"larger than {limit} bytes when decompressed")
                if not part and not data and not member.eof:
                    raise Undecodable("the gzip data ends too early")
                parts.append(part)
        except zlib.error as error:
            raise Undecodable("not valid gzip data") from error
        data = member.unused_data
    return b"".join(parts)


def check_hash(expected: str, content: bytes) -> None:
    """Compare `content` with an Ignition verification hash (`sha256-<hex>` or `sha512-<hex>`).

    Raises Undecodable. The hash is of the decompressed content (Ignition's spec). The MCD ignores it; a config that
    says what it wants and cannot be that is damaged, and damage is cheapest to find before anything is written.
    """
    match = _HASH.fullmatch(expected)
    if not match:
        raise Undecodable("expected sha256-<hex> or sha512-<hex>")
    kind, wanted = match.groups()
    found = hashlib.new(kind, content)
    if len(wanted) != found.digest_size * 2:
        raise Undecodable(f"a {kind} has {found.digest_size * 2} hex digits, found {len(wanted)}")
    if found.hexdigest() != wanted.lower():
        raise Undecodable("the contents do not have this hash")
