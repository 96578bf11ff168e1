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
    r"(?P<name>passw(?:or)?ds?|jwt(?<![^\W_]jwt)|pw(?:(?<![^\W_]pw)|(?<=(?:bind|root)pw))"
    r"|(?:jsession|phpsess|session)id|passcodes?|passphrases?|pwd|secret(?!ar)[\w-]{0,40}+|credentials?"
    r"|authorization|(?<![^\W_])auth|cookies?|api_?keys|accesssignature|x-amz-signature|token|pat(?<=[_-]pat)"
    r"|webhooks?(?:[_-]?(?:ur[il]|address))?+"
    r"|sig(?<=[_?&-]sig)|signature(?<=[?&]signature)|code(?<=[?&]code)"
    # not the word `key` alone, and not the end of a common word
    r"|key(?:(?<=[\w?&-]key)|(?<=(?:api|ess|ret|ate).key))(?<!monkey)(?<!donkey)(?<!turkey)(?<!turnkey)(?<!hockey)(?<!jockey)"
    r"(?<!whiskey)(?<!hotkey)"
    # nor keys by which something is sorted, found or drawn
    r"(?<!rng[ _.-]key)(?<!(?:sort|loss|prng)[ _.-]key)(?<!metric[ _.-]key)(?<!missing.key)"
    # not a pass over data or a filter's pass, and not the end of a common word; the word `pass`
    # alone only where a value is assigned to it
    r"|pass(?:(?<=[\w-]pass)|(?=[ \t]?=|\\?['\"]))(?<!bypass)(?<!compass)(?<!trespass)(?<!surpass)"
    r"(?<!overpass)(?<!underpass)(?<!ward.pass)(?<!low.pass)(?<!lowpass)(?<!high.pass)"
    r"(?<!highpass)(?<!band.pass)(?<!bandpass)"
    r"(?<!(?:all|one|two).pass)(?<!(?:first|third|multi).pass)(?<!second.pass))"
)
_WORDY = ("authorization", "cookie", "passphrase")
"""Names whose values have several words: the rest of the line is hidden."""
_AMBIGUOUS = ("token", "key", "pass", "pw", "webhook", "auth", "sig", "code", "cookie", "cookies")
"""Machine learning and specs use these words, too: numbers, shapes, null, a truth value, a special
token such as `<pad>`, a metric's name, `${NAME}` or the name of a kind of login after them is
shown."""
_NUMBER = r"[-+]?(?:\d{1,5}+(?:\.\d{0,20}+)?|\.\d{1,20}+|nan|inf)(?:e[-+]?\d{1,3})?"
_NOT_SECRET = re.compile(
    rf"[\"']?(?:{_NUMBER}(?:±{_NUMBER})?(?:[mun]?s|%|[kmg]i?b?)?"
    rf"|(?:(?:torch\.size|tensor|array)\()?[\[(]{{1,3}}\s*+{_NUMBER}(?:[,\s]++{_NUMBER})*+[,\s]*+[\])]{{1,4}}"
    r"|<[/|]{0,2}[a-z_]{1,20}+\d{0,3}\|?/?>|\[(?:unk|pad|cls|sep|mask|bos|eos)\]|[▁ġ][a-z]{0,20}"
    r"|(?:train|val|valid|test|eval)/[a-z_]{1,20}"
    r"|none|null|true|false|yes|no|basic|bearer|digest|oauth2?|ntlm|kerberos|\$?\$\{\w{1,200}\})[\"']?[.,;:]?"
)
_CLOSED = ("'", '"', "[", "{", "(")
"""The first characters of values that have a closing character."""
_DIRECTORIES = {"PWD", "OLDPWD"}
"""Variables of a shell that are no passwords."""

# Quantifiers are possessive. An unclosed value ends with the line; a value crosses line breaks
# only where a bracket ends a line, and in the blocks and lists of YAML.
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
_BELOW = r"""
    [\[({][ \t]{0,9}+\r?\n[^\])}]{0,2000}+[\])}]?+
    | (?:[|>][-+\d]{0,2}+[ \t]{0,9}+\r?\n(?P<margin>[ \t]{1,99}+)
        | \r?\n(?P<item>[ \t]{0,99}+-[ \t]{1,9}+))[^\n]++
        (?:\n(?:(?(margin)(?P=margin)|(?P=item)))[^\n]*+)*+
"""
_VALUE = (
    rf"(?:{_BELOW}|{_SCHEME}{_ONE}(?:[ \t]{{0,9}}=[ \t]{{0,9}}{_ONE})*+)"  # `password: str = "X"`
)
_COLOUR = r"(?:\x1b\[[\d;]{0,20}+m)*+"
_BETWEEN = rf"""
    (?: {_COLOUR}(?:\\*+[\"'`]|%(?:25)*+2[27])?\]?{_COLOUR}[ \t]{{0,99}}+
        (?:==?>|->|:=|==?|:|>|%(?:25)*+3[ad])
        [ \t]{{0,99}}+{_COLOUR}(?:[\"'][ \t]?,[ \t]?|%(?:25)*+2[27])?
        # a value alone on the next line, which is no name with a value of its own
        (?:\r?\n(?:[ \t]{{1,99}}+|(?=[\"']))
            (?![\"']?[\w.-]{{1,60}}+(?:[\"'][ \t]?:|:\s|[ \t]?=[ \t\w]))
            (?=[\"']|\S++[ \t]{{0,9}}+(?:\r?\n|\Z)))?+
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
    "pat", "sig", "code", "webhook", "pw", "jwt", "sessionid", "phpsessid",
)  # fmt: skip
"""Each name contains one of these. A text without them, or without a separator between a name and
a value, needs no further search."""
_FIRST_LOOK = re.compile(r"[=:>\"'%]|(?<!\S)-")
_NAME_ENDS = re.compile(rf"{_NAME}=")
_REST = re.compile(r"(?:[^\n'\"]|['\"](?=\w))*+")

_SPOKEN = re.compile(  # the password is X
    r"(?i:(?P<name>passw(?:or)?d|(?<![^\W_])(?:passcode|passphrase|pwd|secret|token|jwt"
    r"|(?:api|access|secret|signing)[ _-]?key)))"
    r"(?P<between>(?:[ \t]{1,9}+(?:for|of)[ \t]{1,9}+(?:user[ \t]{1,9}+)?+[^\s'\"]{1,60}+)?+"
    r"(?:[ \t]{1,9}+(?:is|was))?+(?:[ \t]{0,9}+[|│┃→][ \t]{0,9}+|[ \t]{1,9}+)['\"]?+)"
    r"(?P<value>[^\s'\",;]{4,}+)"
)
_NO_OPTION = (  # `-pretrained`: the beginnings of options of one hyphen
    r"(?!(?i:re(?:train|cis|dict|fetch|fix|set|tty|proc|view)|r(?:un[ei]|int|of|ogr|oj|ob|oxy)|in_?mem|ar(?:am|allel)"
    r"|at(?:h|ien|ch|tern)|olicy|ool|lot|eriod|ort))"
)
_ATTACHED = re.compile(
    rf"(?<![^\s'\"])(?P<name>-p)(?P<between>){_NO_OPTION}"
    r"(?P<value>[^\s'\"=/:,;-][^\s'\"=/:,;]{3,}+)"
    r"(?![=/:])"
)
_LOGIN_COMMAND = re.compile(
    r"(?<![\w-])(?P<command>mysql|mariadb|mongo|7z|sshpass|(?:docker|podman)[ \t]{1,9}+login"
    r"|redis-cli|ldap|sqlcmd|zip|unzip|curl|smbclient|rpcclient)"
    r"(?P<rest>[\w-]{0,20}+[ \t'\"][^\n]{0,500}+)"
)
_APART = r"(?:[ \t]{1,9}+|['\"][ \t]?,[ \t]?['\"])"
_WHOLE_VALUE = r"(?:'[^'\n]*+'|\"[^\"\n]*+\"|[^\s'\",]++)"
_LOGIN_OPTIONS = {
    # a word after a blank is something else
    **dict.fromkeys(("mysql", "mariadb", "7z"), f"-p{_NO_OPTION}"),
    **dict.fromkeys(("sshpass", "docker", "podman"), f"-p{_APART}?"),
    "mongo": f"-p{_APART}",
    **dict.fromkeys(("sqlcmd", "zip", "unzip"), f"-P{_APART}?"),
    "redis": f"-a{_APART}?",
    "ldap": f"-w{_APART}?",
    **dict.fromkeys(("smbclient", "rpcclient"), rf"-U{_APART}?['\"]?[^\s%'\"]{{0,60}}%"),
    "curl": rf"(?:-[uU]{_APART}?|--(?:proxy-)?user(?:{_APART}|=))['\"]?[^\s:'\"]{{0,60}}:",
}
"""By the first word of a command, what stands before a password on its command line."""

_FORMS = (
    r"^(?:[<>*][ \t]?)?(?:PASS|AUTH(?:[ \t]\w{1,40})?)[ \t]{1,9}(?=[^\s\d]{0,99}\d)"
    r"(?!(?i:test)|[^\s/:]{0,99}[/:])(?=\S{6,200}[ \t]{0,9}\r?$)",  # FTP (RFC 959), Redis
    r"(?i:\b(?:requirepass|masterauth)[ \t]{1,9})",  # redis.conf
    r"(?i:\bidentified[ \t]{1,9}(?:with[ \t]{1,9}[^\s;]{1,60}[ \t]{1,9})?"
    r"by[ \t]{1,9}(?:password[ \t]{1,9})?(?=['\"]))",  # MySQL, Oracle
    # a quoted word, or one after the name of a user: also one that looks like any other
    r"(?i:passw(?:or)?d[ \t]{1,9}(?:(?:is|was)[ \t]{1,9})?(?=['\"]))",
    r"(?i:passw(?:or)?d[ \t]{1,9}(?:for|of)[ \t]{1,9}(?:user[ \t]{1,9})?[^\s:=]{1,60}[ \t]?[:=]"
    r"[ \t]{0,9}(?=\S{1,200}[ \t]{0,9}\r?$))",
    r"\bwandb[ \t]{1,9}login[ \t]{1,9}(?:--\S{1,40}[ \t]{1,9}){0,3}(?=[\w-]{0,99}\d)",
    r"HTTP(?:Basic|Digest|Proxy)Auth\([^,\n]{1,99},[ \t]{0,9}(?=['\"])",  # requests
    r"(?<![^\s'\"])-{1,2}pass(?:in|out)?[ \t=]{1,9}pass:",  # openssl-passphrase-options
)
"""What stands before passwords in protocols and programs without a word that means a secret."""
_IN_FORM = re.compile(rf"(?m:(?P<before>{'|'.join(_FORMS)})){_WHOLE_VALUE}")

_BEARER = re.compile(
    r"(?<!\w)(?P<name>bearer)(?=[ \t:=])(?P<between>(?:[ \t:=]{1,9}(?:bearer|tokens?)(?!\w))*+"
    r"[ \t:=]{0,9}+)(?!(?:of|and|or|is|was|in|to|for)[ \t])(?P<value>[^\s\"',;]*+)"
)
_BASIC = re.compile(r"(?i:\b(basic[ \t]{1,9}))([A-Za-z0-9+/]{4,}+={0,2})")
_PRIVATE_KEY = re.compile(  # the only secret of several lines; without its end, up to the text's
    r"(?s:(-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----).*?"
    r"(-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z))"
)
_TOKENS = {
    "hf_": r"[A-Za-z0-9]{30,}+",  # Hugging Face
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"[A-Za-z0-9]{36,}+"),  # GitHub
    "github_pat_": r"\w{50,}+",
    **dict.fromkeys(("glpat-", "gldt-", "glrt-"), r"[\w-]{20,}+"),  # GitLab
    "xox": r"[abeprs]-[A-Za-z0-9-]{20,}+",  # Slack
    "xapp-": r"[A-Za-z0-9-]{20,}+",
    "hooks.slack.com/": r"[\w/-]{10,}+",
    "sk-": r"(?:(?:proj|ant|or)-[A-Za-z0-9]{0,9}-?)?[A-Za-z0-9_]{32,}+",  # OpenAI and similar
    **dict.fromkeys(("AKIA", "ASIA"), r"[0-9A-Z]{16}(?!\w)"),  # AWS
    "AIza": r"[\w-]{35,}+",  # Google
    "ya29.": r"[\w-]{20,}+",
    **dict.fromkeys(
        ("sk_live_", "rk_live_", "sk_test_", "rk_test_"), r"[A-Za-z0-9]{16,}+"
    ),  # Stripe
    "npm_": r"[A-Za-z0-9]{36,}+",
    "pypi-": r"[\w-]{50,}+",
    "SG.": r"[\w-]{16,32}\.[\w-]{16,}+",  # SendGrid
    "dckr_pat_": r"[\w-]{20,}+",  # Docker Hub
    "dop_v1_": r"[a-f0-9]{64}",  # DigitalOcean
    "AGE-SECRET-KEY-1": r"[0-9A-Z]{50,}+",  # age
    "eyJ": r"[\w-]{10,}+\.eyJ[\w-]{10,}+\.[\w-]{10,}+",  # JSON web tokens (RFC 7519)
    **dict.fromkeys(
        ("discord.com/api/webhooks/", "discordapp.com/api/webhooks/"), r"[\w/-]{10,}+"
    ),
}
"""By the documented prefix of a kind of token, what follows it. Only a text with one of the
prefixes is searched."""
_KNOWN_TOKEN = re.compile(
    rf"(?<![\w-])(?:{'|'.join(re.escape(start) + rest for start, rest in _TOKENS.items())})"
)
_ADDRESS = re.compile(r"://(?:(?P<before>\S*)@|\S+)")
_LOGIN = re.compile(r"(?:\A|://)(?=[^/?#:]*+:(?!//))")
_USER = re.compile(r"(?P<start>\A|://)[^/?#:@]*+(?=@|\Z)")
_WRITTEN_ADDRESS = re.compile(  # in JSON, in a query (RFC 3986), and without its scheme
    r"(?i:(?P<start>:(?:\\{1,4}/){2}|%(?:25){0,3}3a(?:%(?:25){0,3}2f){2}"
    r"|(?<![\w:/.])//(?=[^\s/?#@:]{0,100}:))"
    r"(?:(?!%(?:25){0,3}(?:2f|3f|23|40))[^\s/?#@\"'\\&]){1,300}+(?P<end>@|%(?:25){0,3}40))"
)
_USER_AND_PASSWORD = re.compile(r"[^\W\d][^\s/:]*+:(?!//)\S+")
_PASSWORD = re.compile(r"://[^\s/?#:@]*+:(\S+)@")


_SAME = str.maketrans(
    dict.fromkeys("\xa0\u202f\u3000\ufeff" + "".join(map(chr, range(0x2000, 0x200E))), " ")
    | {"\u0130": "i", "\uff1a": ":", "\uff1d": "="}
)
"""The only letter that `lower` turns into two characters; blanks, colons and equals signs."""


def is_secret(name: str, value: object = "?") -> bool:
    """Return whether a name, such as `DB_PASSWORD` or `api-key`, means a secret."""
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
    - what follows words of protocols and programs (`IDENTIFIED BY`, `requirepass`, `mysql -p`)
    - tokens, JSON web tokens and webhooks with a documented prefix (`hf_`, `ghp_`, `AKIA`, ...)

    A secret that appears in none of these forms is not found.
    """
    for value in _values_of_environment():
        text = text.replace(value, HIDDEN)
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}\2", text)
    if any(start in text for start in _TOKENS):
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
    if any(word in lowered for word in ("pass", "auth", "identified", "wandb")):
        text = _IN_FORM.sub(rf"\g<before>{HIDDEN}", text)
    if "bearer" in lowered:
        text = _without_values(text, _lower(text), _BEARER)
    if "basic" in lowered:
        text = _BASIC.sub(_without_login, text)
    if "@" in text or "%40" in text or "2540" in text:
        text = _WRITTEN_ADDRESS.sub(rf"\g<start>{HIDDEN}\g<end>", text)
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
    return (text if text.isascii() else text.translate(_SAME)).lower()


def _is_plain(name: str, value: str) -> bool:
    return name in _AMBIGUOUS and _NOT_SECRET.fullmatch(value) is not None


def _without_values(text: str, lowered: str, pattern: re.Pattern[str]) -> str:
    parts, end = [], 0
    for found in pattern.finditer(lowered):
        start, stop = found.span("value")
        if start < end or _is_plain(found["name"], found["value"]):
            continue
        closed = lowered.startswith(_CLOSED, start)
        is_login = _USER_AND_PASSWORD.fullmatch(text[start:stop])
        if found["name"] == "auth" and not (closed or is_login or _is_mixed(text[start:stop])):
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
    """Return secret values in each form in which text may contain them, the longest first."""
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
    # The longest first, because one may be the beginning of another.
    return sorted((one for one in forms if len(one) >= SHORTEST), key=len, reverse=True)


def _unquoted(text: str) -> str:
    return urllib.parse.unquote(text, errors="surrogateescape")
