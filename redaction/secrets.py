"""Remove secrets from text, and decide which names mean a secret.

The time is linear in the length of the text: patterns use possessive and bounded quantifiers, so
that no attempt scans more than a bounded number of characters again. What must not live here:
where the text comes from or goes to, and what a spec may contain.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import os
import re
import urllib.parse

HIDDEN = "[hidden]"

SHORTEST = 6
"""The fewest characters of an environment variable's value that is searched for: a shorter value
would match parts of words."""

# A secret's name ends with one of these words. The patterns and the searched text are in lower
# case. Each alternative begins with a plain letter, which makes the search fast.
_NAME = (
    r"(?P<name>passw(?:or)?ds?|passcodes?|passphrases?|pwd|secret(?!ar)[\w-]{0,40}+|credentials?"
    r"|authorization|(?<![^\W_])auth|cookies?|api_?keys|accesssignature|x-amz-signature|token|pat(?<=[_-]pat)"
    r"|webhooks?(?:[_-]?(?:ur[il]|address))?+"
    r"|sig(?<=[_?&-]sig)|signature(?<=[?&]signature)|code(?<=[?&]code)"
    # not the word `key` alone, and not the end of a common word
    r"|key(?:(?<=[\w?&-]key)|(?<=(?:api|ess|ret|ate).key))(?<!monkey)(?<!donkey)(?<!turkey)(?<!turnkey)(?<!hockey)(?<!jockey)"
    r"(?<!whiskey)(?<!hotkey)"
    # not a pass over data or a filter's pass, and not the end of a common word; the word `pass`
    # alone only where a value is assigned to it
    r"|pass(?:(?<=[\w-]pass)|(?=[ \t]?=|\\?['\"]))(?<!bypass)(?<!compass)(?<!trespass)(?<!surpass)"
    r"(?<!overpass)(?<!underpass)(?<!ward.pass)(?<!low.pass)(?<!lowpass)(?<!high.pass)"
    r"(?<!highpass)(?<!band.pass)(?<!bandpass))"
)
_WORDY = ("authorization", "cookie", "passphrase")
"""Names whose values have several words: the rest of the line is hidden."""
_AMBIGUOUS = ("token", "key", "pass", "webhook", "auth")
"""Machine learning and specs use these words, too: a number, null, a truth value, `${NAME}` or the
name of a kind of login after them is shown."""
_NOT_SECRET = re.compile(
    r"[\"']?(?:[-+]?(?:\d{1,5}|\d{0,5}\.\d+(?:e[-+]?\d+)?|nan|inf)(?:[mun]?s|%|[kmg]i?b?)?"
    r"|none|null|true|false|basic|bearer|digest|oauth2?|ntlm|kerberos|\$?\$\{\w{1,200}\})[\"']?[.,;:]?"
)
_CLOSED = ("'", '"', "[", "{", "(")
"""The first characters of values that have a closing character."""
_DIRECTORIES = {"PWD", "OLDPWD"}
"""Variables of a shell that are no passwords."""

# No pattern crosses a line break, and quantifiers are possessive: an unclosed value ends with the
# line.
_BRACKETS = r"\[[^\]\n]*+\]?+ | \{[^}\n]*+\}?+ | \([^)\n]*+\)?+"
_QUOTED = r"""
    [rbuf]{0,2}(?:
        \"{3}(?:(?!\"{3})[^\n])*+(?:\"{3})?+ | '{3}(?:(?!'{3})[^\n])*+(?:'{3})?+
        | \"(?:[^\"\\\n]|\\[^\n])*+\"?+ | '(?:[^'\\\n]|\\[^\n])*+'?+
    )
    | \\++(?:\"[^\"\n]*+\"?+ | '[^'\n]*+'?+)    # JSON inside JSON
"""
_PLAIN = r"[^\s&;,'\"()\[\]{}]++"
# Punctuation inside a word belongs to the value, unless a name follows it: `a=X&b=Y`.
_INSIDE = r"[&;,'\")\]}]++(?=\S)(?![\w.-]{1,60}+\\*+[\"']?[ \t]?[=:])"
_ONE = (
    rf"(?=[^\s&;,)\]}}]|{_INSIDE})(?:(?:{_QUOTED})++ | {_BRACKETS})?+"
    rf"(?: {_PLAIN} | {_INSIDE} | {_BRACKETS})*+"
)
_SCHEME = r"(?:(?:bearer|basic|token)[ \t]{1,9}+)?+"
_VALUE = rf"{_SCHEME}{_ONE}(?:[ \t]{{0,9}}=[ \t]{{0,9}}{_ONE})*+"  # `password: str = "X"`
_COLOUR = r"(?:\x1b\[[\d;]{0,20}+m)*+"
_BETWEEN = rf"""
    (?: {_COLOUR}(?:\\*+[\"'`]|%(?:25)*+2[27])?\]?{_COLOUR}[ \t]{{0,99}}+
        (?:=>|->|:=|==?|:|>|%(?:25)*+3[ad])
        [ \t]{{0,99}}+{_COLOUR}(?:[\"'][ \t]?,[ \t]?|%(?:25)*+2[27])?
    | (?:\\*+[\"'])?[ \t]{{0,9}}+,?[ \t]{{0,9}}+(?:\\*+[\"'])?value(?:\\*+[\"'])?
        [ \t]{{0,9}}+[=:][ \t]{{0,9}}+    # "name": "password", "value": "X"
    | \\*+[\"'][ \t]?,[ \t]?(?=\\*+[rbuf]{{0,2}}[\"']) )    # a pair: "password", "X"
"""
_ASSIGNED = re.compile(rf"{_NAME}(?P<between>{_BETWEEN})(?P<value>{_VALUE})", re.VERBOSE)
_OPTION = re.compile(
    rf"(?<![^\s'\"])--?(?=[a-z])[\w.-]{{0,60}}?{_NAME}(?P<between>[ \t]{{1,99}}+)"
    rf"(?P<value>(?!-){_VALUE})",
    re.VERBOSE,
)
_WORDS = (
    "pass", "pwd", "secret", "credential", "auth", "cookie", "signature", "token", "key",
    "pat", "sig", "code", "webhook",
)  # fmt: skip
"""Each name contains one of these. A text without them, or without a separator between a name and
a value, needs no further search."""
_FIRST_LOOK = re.compile(r"[=:>\"'%]|(?<!\S)-")
_NAME_ENDS = re.compile(rf"{_NAME}=")
_REST = re.compile(r"(?:[^\n'\"]|['\"](?=\w))*+")

_SPOKEN = re.compile(  # the password is X
    r"(?i:(?<![\w-])(?P<name>passw(?:or)?d|passcode|passphrase|pwd|api[ _-]?key|secret|token))"
    r"(?P<between>(?:[ \t]{1,9}+for[ \t]{1,9}+[^\s'\"]{1,60}+)?+(?:[ \t]{1,9}+(?:is|was))?+"
    r"[ \t]{1,9}+['\"]?+)(?P<value>[^\s'\",;]{4,}+)"
)
_ATTACHED = re.compile(
    r"(?<![^\s'\"])(?P<name>-p)(?P<between>)(?P<value>[^\s'\"=/:,;-][^\s'\"=/:,;]{3,}+)"
    r"(?![=/:])"
)
_LOGIN_COMMAND = re.compile(
    r"(?<![\w-])(?P<command>mysql|mariadb|7z|sshpass|docker[ \t]{1,9}+login|podman[ \t]{1,9}+login"
    r"|redis-cli|ldap|sqlcmd|zip|unzip|curl)(?P<rest>[\w-]{0,20}+[ \t'\"][^\n]{0,500}+)"
)
_APART = r"(?:[ \t]{1,9}+|['\"][ \t]?,[ \t]?['\"])"
_WHOLE_VALUE = r"(?:'[^'\n]*+'|\"[^\"\n]*+\"|[^\s'\",]++)"
_LOGIN_OPTIONS = {
    **dict.fromkeys(("mysql", "mariadb", "7z"), "-p"),  # a word after a blank is something else
    **dict.fromkeys(("sshpass", "docker", "podman"), f"-p{_APART}?"),
    **dict.fromkeys(("sqlcmd", "zip", "unzip"), f"-P{_APART}?"),
    "redis": f"-a{_APART}?",
    "ldap": f"-w{_APART}?",
    "curl": rf"(?:-u{_APART}?|--user(?:{_APART}|=))['\"]?[^\s:'\"]{{0,60}}:",
}
"""By the first word of a command, what stands before a password on its command line."""

_BEARER = re.compile(
    r"(?<!\w)(?P<name>bearer)(?=[ \t:=])(?P<between>(?:[ \t:=]{1,9}(?:bearer|tokens?)(?!\w))*+"
    r"[ \t:=]{0,9}+)(?P<value>[^\s\"',;]*+)"
)
_BASIC = re.compile(r"(?i:\b(basic[ \t]{1,9}))([A-Za-z0-9+/]{4,}+={0,2})")
_PRIVATE_KEY = re.compile(  # the only secret of several lines; without its end, up to the text's
    r"(?s:(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----).*?(-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z))"
)
_TOKEN_STARTS = (
    "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "sk-",
    "AKIA", "eyJ", "hooks.slack.com/", "/api/webhooks/",
)  # fmt: skip
"""Prefixes of tokens of known forms. Only a text with one of them is searched for these forms."""
_KNOWN_TOKEN = re.compile(  # Hugging Face, GitHub, GitLab, Slack, OpenAI and similar, AWS, JWT,
    # and webhooks of Slack and Discord
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{30,}+|gh[pousr]_[A-Za-z0-9]{36,}+|github_pat_\w{50,}+"
    r"|glpat-[\w-]{20,}+|xox[abeprs]-[A-Za-z0-9-]{20,}+"
    r"|sk-(?:(?:proj|ant|or)-[A-Za-z0-9]{0,9}-?)?[A-Za-z0-9_]{32,}+|AKIA[0-9A-Z]{16}(?!\w)"
    r"|eyJ[\w-]{10,}+\.eyJ[\w-]{10,}+\.[\w-]{10,}+"
    r"|hooks\.slack\.com/[\w/-]{10,}+|discord(?:app)?\.com/api/webhooks/[\w/-]{10,}+)"
)
_ADDRESS = re.compile(r"://(?:(?P<before>\S*)@|\S+)")
_LOGIN = re.compile(r"(?:\A|://)(?=[^/?#:]*+:(?!//))")
_USER = re.compile(r"(?P<start>\A|://)[^/?#:@]*+(?=@|\Z)")
_PASSWORD = re.compile(r"://[^\s/?#:@]*+:(\S+)@")


def is_secret(name: str, value: object = "?") -> bool:
    """Return whether a name, such as `DB_PASSWORD` or `api-key`, means a secret.

    Args:
        name: The name of a variable, an argument or an option, or a parameter's dotted path.
        value: Its value. A number, a truth value or None is not a token or key.
    """
    found = _NAME_ENDS.search(f"{_lower(name[-100:])}=")
    return found is not None and not _is_plain(found["name"], _lower(str(value)))


def redact_value(name: str, value: str) -> str:
    """Return the value of the field `name` without secrets."""
    return HIDDEN if value and is_secret(name, value) else redact(value)


def redact(text: str) -> str:
    """Return `text` without secrets.

    Hidden are:

    - the values of this process' environment variables with names of secrets, also as URLs, JSON
      and Python write them
    - values after such a name (`API_KEY=X`, `"password": "X"`, `--token X`, `?sig=X`)
    - what follows `Bearer` and `Basic`; private keys; the userinfo of URLs
    - tokens in the forms of Hugging Face, GitHub, GitLab, Slack, OpenAI and AWS; JSON web tokens
    - webhooks of Slack and Discord

    A secret that appears in none of these forms is not found.
    """
    for value in _values_of_environment():
        text = text.replace(value, HIDDEN)
    if "PRIVATE KEY-----" in text:
        text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}\2", text)
    if any(start in text for start in _TOKEN_STARTS):
        text = _KNOWN_TOKEN.sub(HIDDEN, text)
    lowered = _lower(text)
    if _FIRST_LOOK.search(lowered) and any(word in lowered for word in _WORDS):
        text = _without_values(text, lowered, _ASSIGNED)
        text = _without_values(text, _lower(text), _OPTION)
    if any(word in lowered for word in _WORDS):
        text = _SPOKEN.sub(_without_mixed, text)
    if "-" in text:
        text = _LOGIN_COMMAND.sub(_without_password, text)
        text = _ATTACHED.sub(_without_mixed, text)
    if "bearer" in lowered:
        text = _without_values(text, _lower(text), _BEARER)
    if "basic" in lowered:
        text = _BASIC.sub(_without_login, text)
    return _ADDRESS.sub(_without_userinfo, text) if "://" in text else text


def redact_clipped(text: str, limit: int) -> str:
    """Return the first `limit` characters of `text` without secrets, with an ellipsis if cut.

    The time does not depend on the rest of the text. If the cut splits the value of a secret
    environment variable, its beginning is removed, too.
    """
    if len(text) <= limit:
        return redact(text)
    text = text[:limit]
    for value in _values_of_environment():
        size = next((n for n in range(len(value) - 1, 2, -1) if text.endswith(value[:n])), 0)
        text = text[: len(text) - size]
    return f"{redact(text)}…"


def _lower(text: str) -> str:
    # The only letter that lower() turns into two characters.
    return text.replace("\u0130", "i").lower()


def _is_plain(name: str, value: str) -> bool:
    return name in _AMBIGUOUS and _NOT_SECRET.fullmatch(value) is not None


def _without_values(text: str, lowered: str, pattern: re.Pattern[str]) -> str:
    parts, end = [], 0
    for found in pattern.finditer(lowered):
        start, stop = found.span("value")
        if start < end or _is_plain(found["name"], found["value"]):
            continue
        closed = lowered.startswith(_CLOSED, start)
        if found["name"] == "auth" and not closed and not _is_mixed(text[start:stop]):
            continue  # a log writes `auth: session opened`
        wordy = found["name"].startswith(_WORDY) and not closed
        if wordy and (rest := _REST.match(lowered, stop)):
            stop = rest.end()
        parts += [text[end:start], HIDDEN]
        end = stop
    return "".join([*parts, text[end:]]) if parts else text


def _is_mixed(value: str, *, least: int = 6) -> bool:
    """Return whether a word looks like a secret: letters of both cases, or with digits or signs.

    Paths do not.
    """
    value = value.rstrip(".,;:!?)")
    if len(value) < least or value.startswith(("/", "./", "~", HIDDEN)):
        return False
    kinds = (
        any(one.isalpha() for one in value),
        any(one.isdigit() for one in value),
        any(one in "!@#$%^&*+~?" for one in value),
        value != value.upper() and any(one.isupper() for one in value[1:]),
    )
    return sum(kinds) > 1 and not _NOT_SECRET.fullmatch(_lower(value))


def _without_mixed(found: re.Match[str]) -> str:
    # Machine learning has tokens of its own, and only long words of those are secrets.
    least = 16 if found["name"].lower() == "token" else 6
    is_loud = found["name"] == "-p" and found["value"].isupper()  # no option is
    if not is_loud and not _is_mixed(found["value"], least=least):
        return found[0]
    return f"{found['name']}{found['between']}{HIDDEN}"


def _without_password(found: re.Match[str]) -> str:
    command = found["command"].split()[0].removesuffix("-cli")
    options = re.compile(
        rf"(?<![^\s'\"])({_LOGIN_OPTIONS[command]})(?!-|\[hidden\]){_WHOLE_VALUE}"
    )
    rest = options.sub(lambda one: f"{one[1]}{HIDDEN}", found["rest"])
    return f"{found['command']}{rest}"


def _without_login(found: re.Match[str]) -> str:
    if len(found[2]) % 4:
        return found[0]
    try:
        login = base64.b64decode(found[2], validate=True)
    except binascii.Error:
        return found[0]
    return f"{found[1]}{HIDDEN}" if b":" in login else found[0]


def _without_userinfo(found: re.Match[str]) -> str:
    before = found["before"]
    if before is None:
        return found[0]
    if login := _LOGIN.search(before):  # a password may contain characters that end a host
        return f"://{before[: login.end()]}{HIDDEN}@"
    if user := _USER.search(before):
        return f"://{before[: user.end('start')]}{HIDDEN}{before[user.end() :]}@"
    return found[0]


def _values_of_environment() -> list[str]:
    return _all_forms(
        frozenset(
            (name, value)
            for name, value in os.environ.items()
            if len(value) >= SHORTEST and (_is_named(name) or "://" in value)
        )
    )


@functools.lru_cache(maxsize=4096)
def _is_named(name: str) -> bool:
    return name not in _DIRECTORIES and is_secret(name)


@functools.lru_cache(maxsize=1)
def _all_forms(variables: frozenset[tuple[str, str]]) -> list[str]:
    """Return secret values in each form in which text may contain them. The longest come first,
    because one may be the beginning of another.
    """
    values: set[str] = set()
    for name, value in variables:
        if _is_named(name):
            values |= {value, *value.splitlines()}
        else:
            values |= {part for one in _PASSWORD.findall(value) for part in (one, _unquoted(one))}
    forms = {
        form
        for value in values
        for form in (
            value,
            urllib.parse.quote(value, errors="surrogateescape"),
            urllib.parse.quote(value, safe="", errors="surrogateescape"),
            urllib.parse.quote_plus(value, errors="surrogateescape"),
            json.dumps(value)[1:-1],
            json.dumps(value, ensure_ascii=False)[1:-1],
            repr(value)[1:-1],
        )
    }
    return sorted((one for one in forms if len(one) >= SHORTEST), key=len, reverse=True)


def _unquoted(text: str) -> str:
    return urllib.parse.unquote(text, errors="surrogateescape")
