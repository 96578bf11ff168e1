"""Redaction: what it hides, what it keeps, and that it is linear in the text."""

from __future__ import annotations

import json
import os
import time
import urllib.parse
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redaction.secrets import HIDDEN, is_secret, redact, redact_clipped, redact_value

CANARY = "canary7f3a"
NAMES = (
    "DB_PASSWORD", "PGPASSWORD", "MYSQL_PWD", "DB_PASS", "SSH_PASSPHRASE", "TOKEN", "HUB_TOKEN",
    "GITHUB_PAT", "API_KEY", "apikey", "apiKey", "api-key", "AWS_SECRET_ACCESS_KEY", "OPENAIKEY",
    "client_secret", "SECRET_OF_ADA", "GOOGLE_CREDENTIALS", "db.passwd", "AUTHORIZATION", "Cookie",
    "REQUEST_SIG", "SLACK_WEBHOOK", "SLACK_WEBHOOK_URL", "webhookUrl", "notify.webhook",
)  # fmt: skip
NO_NAMES = (
    "key", "task.key", "task.key_dim", "task.num_tokens", "task.tokenizer", "tokens", "monkey",
    "keyboard", "compass", "bypass", "lowpass", "low_pass", "forward_pass", "passes", "passed",
    "keys", "missing_keys", "AWS_ACCESS_KEY_ID", "PATH", "pattern", "n_pat_h", "sigma", "design",
    "signature", "secretary", "webhooked", "val/token_accuracy", "train.optimizer.lr",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_secrets_of_this_machine() -> Iterator[None]:
    with mock.patch.dict(os.environ, {"PATH": os.environ["PATH"]}, clear=True):
        yield


@pytest.mark.parametrize("name", NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert redact_value(name, "v") == HIDDEN
    assert redact_value(name, "") == ""


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)
    assert redact(f"{name}=value, {name}: 'value'") == f"{name}=value, {name}: 'value'"


@pytest.mark.parametrize("value", [0, 128, 2.5e-3, True, None])
def test_number_is_no_token(value: object) -> None:
    assert not is_secret("task.pad_token", value)
    assert is_secret("task.db_password", value)


@pytest.mark.parametrize(
    "text",
    [
        "the key is 3, token 5 of 7", "token embedding dim", "n_tokens=512", "max_tokens: 4096",
        "tokenizer=bert", "pass 2 of 3", "key=lambda x", "monkey=1", "val/token_accuracy=0.5",
        "KeyError: 'key'", "short stays: abc", "eos_token: 2, pad_token=None", "PASS: test_one",
        "seconds_per_token=0.0123456", "forward_pass: 3.1ms", "missing_keys=['a.weight']",
        "the token is lost and the key was here", "-s train.lr=0.1 --trials 4", "basic features",
        "http://127.0.0.1:5000/#/experiments/1", "https://host/p@th?n=1&x=2", "ada@host: hello",
        "Basic block 3", "sorted(x, key=len)", "sig=3", "s3://bucket/prefix", "código: já está",
        "sk-learn 1.6 with sk-image", "hf_hub_download of hf_model_with_a_very_long_name_in_it",
        "run 0f8fad5bd9cb469fa165708867e4c1f2", "sha256:" + "9f86d081884c7d65" * 4,
        "eyJust.eyJust.it",
        "gcc -pthread -pipe", "mkdir -p a/b2", "ssh -p2222 ada@host", "docker run -p8080:80",
        "find . -print0 -path/x1", "mysql -p db", "unzip -p a.zip b1", "curl -u ada host",
        "wrong password for user ada", "password must be set", "password authentication failed",
        "PASSWORD REQUIRED", "enter the password again", "secret sauce", "token <|endoftext|>",
        "pwd /home/ada/run3", "token gpt2", "auth: session opened", "auth=basic, auth: none",
        "author: ada2", "oauth: 2", '{"auth": true}', "the passphrase is empty",
        "AKIA is a band", "epoch 3/10: val/loss 0.1234, lr 1.0e-04", "github_pattern_of_files",
    ],
)  # fmt: skip
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert redact(text) == text


_A = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7" * 3  # letters and digits, as in a token


@pytest.mark.parametrize(
    "token",
    [
        f"hf_{_A[:34]}", f"ghp_{_A[:36]}", f"gho_{_A[:36]}", f"github_pat_{_A[:22]}_{_A[:59]}",
        f"glpat-{_A[:20]}", f"xoxb-123456789012-{_A[:24]}", f"sk-{_A[:48]}", f"sk-proj-{_A}",
        f"sk-ant-api03-{_A}", "AKIAIOSFODNN7EXAMPLE", f"eyJhbGciOiJIUzI1NiJ9.eyJ{_A}.{_A[:43]}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["{}", "logged in as {}.", "('{}')", "a={}&b=1", "\n{}\n"])
def test_token_of_a_known_form_is_hidden_without_a_name(token: str, form: str) -> None:
    assert redact(form.format(token)) == form.format("[hidden]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ada:X@db:5432/x", "postgresql://[hidden]@db:5432/x"),
        ("http://X@host/p@th", "http://[hidden]@host/p@th"),
        ("postgres://ada:X/w?d'X#X@X@host/db", "postgres://[hidden]@host/db"),
        ("http://h/?to=s3://ada:X@b and more", "http://h/?to=s3://[hidden]@b and more"),
        ("API_KEY=X was refused", "API_KEY=[hidden] was refused"),
        ('{"a_key":"X","n":1}', '{"a_key":[hidden],"n":1}'),
        ("a_key='X',n=1", "a_key=[hidden],n=1"),
        ("API_KEY='X' was refused", "API_KEY=[hidden] was refused"),
        ("{'hub_token': 'X X', 'n': 1}", "{'hub_token': [hidden], 'n': 1}"),
        ('{"password": "X \\" X", "n": 1}', '{"password": [hidden], "n": 1}'),
        (r'{\"password\": \"X X\", \"n\": 1}', r'{\"password\": [hidden], \"n\": 1}'),
        ('login(db_password="X", n=1)', "login(db_password=[hidden], n=1)"),
        ("f(password=Secret('X'), n=1)", "f(password=[hidden], n=1)"),
        ("api_key: X", "api_key: [hidden]"),
        ('print("api_key:", "X")', 'print("api_key:", [hidden])'),
        ("password = 'X'", "password = [hidden]"),
        ('password: str = "X X"', "password: [hidden]"),
        ("os.environ['DB_PASSWD'] = 'X'", "os.environ['DB_PASSWD'] = [hidden]"),
        ("password=b'X X' n", "password=[hidden] n"),
        ('password="""X "X" X""" n', "password=[hidden] n"),
        ("PGPASSWORD=a,X&X;X'X(X", "PGPASSWORD=[hidden]"),
        ("('token', 'X')", "('token', [hidden])"),
        ("['mysql', '--password', 'X']", "['mysql', '--password', [hidden]]"),
        ("mysql --password X -n 1", "mysql --password [hidden] -n 1"),
        ("sweep --token X --lr 3", "sweep --token [hidden] --lr 3"),
        ("<password>X</password>", "<password>[hidden]"),
        ("a.b?token=X&n=1", "a.b?token=[hidden]&n=1"),
        ("a.b?sig=X%2F&n=1", "a.b?sig=[hidden]&n=1"),
        ("a.b?n=1&access_token=X'", "a.b?n=1&access_token=[hidden]'"),
        ("a.b?X-Amz-Signature=X&n=1", "a.b?X-Amz-Signature=[hidden]&n=1"),
        ("a.b?key=X&n=1", "a.b?key=[hidden]&n=1"),
        ("Authorization: Digest X, X X", "Authorization: [hidden]"),
        ("{'Authorization': 'Bearer X', 'n': 1}", "{'Authorization': [hidden], 'n': 1}"),
        ("sent Bearer X, got 401", "sent Bearer [hidden], got 401"),
        ("sent bearer token X", "sent bearer token [hidden]"),
        ("Cookie: a=X; b=X", "Cookie: [hidden]"),
        ("passphrase: X's X", "passphrase: [hidden]"),
        ("sent Basic YWRhOmNhbmFyeTdmM2E= there", "sent Basic [hidden] there"),
        ("İ password=X", "İ password=[hidden]"),
        ("password: X\nnext: 1", "password: [hidden]\nnext: 1"),
        ('password="X\nnext: 1', "password=[hidden]\nnext: 1"),
        ("token: Bearer X, n", "token: [hidden], n"),
        ("api_key=Basic X", "api_key=[hidden]"),
        ('{"name": "A_KEY", "value": "X"}', '{"name": "A_KEY", "value": [hidden]}'),
        ('<add key="password" value="X" n="1"/>', '<add key="password" value=[hidden] n="1"/>'),
        ("[{Name=DB_PASS,Value=X}]", "[{Name=DB_PASS,Value=[hidden]}]"),
        ("to=%2F%3Ftoken%3DX&n=1", "to=%2F%3Ftoken%3D[hidden]&n=1"),
        ("to=%252F%253Ftoken%253DX", "to=%252F%253Ftoken%253D[hidden]"),
        ("q=%7B%22password%22%3A%22X%22%7D", "q=%7B%22password%22%3A%22[hidden]"),
        ("Incorrect API key: X", "Incorrect API key: [hidden]"),
        ("secret key = 'X'", "secret key = [hidden]"),
        ("-s notify.webhook=https://h/X?X", "-s notify.webhook=[hidden]"),
        ("notify: {webhook: '${A_WEBHOOK}'} ok", "notify: {webhook: '${A_WEBHOOK}'} ok"),
        ("to https://hooks.slack.com/services/T/X now", "to https://[hidden] now"),
        ("at https://discord.com/api/webhooks/1/X now", "at https://[hidden] now"),
        ("\x1b[36mpassword\x1b[0m=\x1b[35mX", "\x1b[36mpassword\x1b[0m=\x1b[35m[hidden]"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nX\nX\n-----END RSA PRIVATE KEY-----\nn",
            "-----BEGIN RSA PRIVATE KEY-----[hidden]-----END RSA PRIVATE KEY-----\nn",
        ),
        ("mysql -u root -pX db", "mysql -u root -p[hidden] db"),
        ("['mysql', '-pX', 'db']", "['mysql', '-p[hidden]', 'db']"),
        ("tool -pX -v", "tool -p[hidden] -v"),
        ("tool -pSECRET -v", "tool -p[hidden] -v"),
        ("sshpass -p letters ssh host", "sshpass -p [hidden] ssh host"),
        ("docker login -u ada -p letters host", "docker login -u ada -p [hidden] host"),
        ("curl -u ada:letters host", "curl -u ada:[hidden] host"),
        ("redis-cli -a letters ping", "redis-cli -a [hidden] ping"),
        ("unzip -P letters a.zip", "unzip -P [hidden] a.zip"),
        ("ldapsearch -w letters -x", "ldapsearch -w [hidden] -x"),
        ("password X was refused", "password [hidden] was refused"),
        ("the password is X.", "the password is [hidden]"),
        ("Password for ada: X", "Password for ada: [hidden]"),
        ("password for ada is X", "password for ada is [hidden]"),
        ("passphrase 'X' and api key X", "passphrase '[hidden]' and api key [hidden]"),
        ("a token X-and-so-on-12345", "a token [hidden]"),
        ("access_key X, n", "access_key [hidden], n"),
        ("aws_secret_access_key X n", "aws_secret_access_key [hidden] n"),
        ("PGPASSWORD X n", "PGPASSWORD [hidden] n"),
        ("the jwt is X", "the jwt is [hidden]"),
        ("wrong password 'letters' n", "wrong password [hidden] n"),
        ("password for ada: letters", "password for ada: [hidden]"),
        ("password ==> letters", "password ==> [hidden]"),
        ("http --auth ada:letters host", "http --auth [hidden] host"),
        ("curl --proxy-user ada:letters h", "curl --proxy-user ada:[hidden] h"),
        ("mongosh -u ada -p letters", "mongosh -u ada -p [hidden]"),
        ("wandb login --relogin X", "wandb login --relogin [hidden]"),
        ('{"auth": "letters", "n": 1}', '{"auth": [hidden], "n": 1}'),
        ("{'auth': ('ada', 'letters')}", "{'auth': [hidden]}"),
        ('{"auths": {"host": {"auth": "X="}}}', '{"auths": {"host": {"auth": [hidden]}}}'),
        ("//registry/:_auth=X", "//registry/:_auth=[hidden]"),
        ("get(auth=('ada', 'letters'))", "get(auth=[hidden])"),
        ("-----BEGIN PRIVATE KEY-----\nX", "-----BEGIN PRIVATE KEY-----[hidden]"),
    ],
)  # fmt: skip
def test_secrets_are_hidden_and_the_rest_is_kept(text: str, shown: str) -> None:
    text = text.replace("X-Amz", "x-amz").replace("X", CANARY).replace("x-amz", "X-Amz")
    assert redact(text) == shown
    assert redact(shown) == shown


_S = "Zx9kQ7vLw2Tn4"


@pytest.mark.parametrize(
    "text",
    [
        # on the next lines: JSON, YAML, Python
        f'"password":\n  "{_S}"', f"password: |\n  a\n  {_S}\nn: 1", f"password: >-\r\n  {_S}",
        f"password:\n  {_S}", f"api_key:\n- {_S}\n- {_S}", f"password=[\n'a',\n'{_S}'\n]",
        f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{_S}\n-----END PGP PRIVATE KEY BLOCK-----",
        # addresses
        f"https:\\/\\/u:{_S}@h", f"https%3A%2F%2Fu%3A{_S}%40h", f"https%253A%252F%252F{_S}%2540h",
        f"//u:{_S}@host/x", f"'//u:{_S}@host'",
        # separators
        f"| password | {_S} |", f"password|{_S}", f"password\xa0=\xa0{_S}", f"password\uff1a{_S}",
        f"password → {_S}", f"PASSWORD\u200b={_S}",
        f"password\u2003:\u2003{_S}", f"│ password │ {_S} │",
        # words
        f"> AUTH {_S}", f"IDENTIFIED WITH a BY '{_S}'",
        f"PASS {_S}", f"USER a\r\nPASS {_S}\r\n", f"AUTH {_S}", f"AUTH ada {_S}",
        f"requirepass {_S}", "requirepass Zx9letters", f"IDENTIFIED BY '{_S}'",
        f"identified by password '{_S}'", f"password of admin: {_S}", f"password of admin is {_S}",
        f"password for user admin is {_S}", f"HTTPBasicAuth('u', '{_S}')", f"JSESSIONID={_S}",
        f"jwt={_S}", f"pw={_S}", f"bind_pw: {_S}", f"plink -pw {_S} h", f"--pw {_S}",
        # command lines
        f"smbclient //h/s -U u%{_S}", f"smbclient -U 'u%{_S}' //h/s",
        f"openssl rsa -passin pass:{_S}",
        f"openssl req -passout pass:{_S}", f"mysql -p{_S}",
        # documented prefixes
        "ASIAZX9IOSFODNN7EXAM", f"AIza{_S}{_S}aaaaaaaaa",
        f"sk_live_{_S}{_S}", f"rk_test_{_S}{_S}", f"npm_{_S * 3}", f"pypi-AgE{_S * 4}",
        f"SG.{_S}aaaaaaaaa.{_S * 3}", f"xapp-1-A0-{_S * 2}", f"dckr_pat_{_S * 2}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["{}", "first line\n{}\nlast line\n"])
def test_no_form_in_which_secrets_are_written_shows_them(text: str, form: str) -> None:
    shown = redact(form.format(text))
    assert HIDDEN in shown
    assert "zx9" not in shown.lower()
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "the password is required", "password for ada: read from the environment",
        "max_token 128", "secret key missing", "auth: 12:30:11 opened", "auth: https://host/login",
        "wandb login first", "mongo -pretrained", "keys jump 3",
        "mode -pretrained2", "train.py -pruning0.5", "-pinMemory", "mysql -pretty",
        "-prefetch4 -ppath/a1",
        "pad_token=<pad>", "eos_token: </s>", "bos_token='<s>'", "unk_token=[UNK]",
        "t_token: <|im_end|>",
        "token: torch.Size([2])", "n_token=1e6", "loss_per_token=2.5±0.1",
        "cls_token: tensor([0.1, -2e-3])",
        "loss_key: val/loss", "sort_key='loss'", "rng_key=[0 42]", "a_key: (3, 4)",
        "key-pass: val/loss",
        "p_sig=0.05", "cookies=3", "?code=5", "second-pass: train accuracy 0.7", "all_pass: yes",
        "bearer of news", "missing_key:\n  layer1.weight", "pw=3", "token:\n  raise ValueError(a)",
        "token:\nnext: 1",
        "a_token:\n  lr: 0.1",
        "PASS test_one_2", "PASS src/a1.test.js", "PASS: 12", "AUTH LOGIN", "identified by its id",
        "a // b:c and d@e", "to=https%3A%2F%2Fhost%2Fp%40th", "https:\\/\\/host\\/p@th",
        "| token | loss | 0.31 |",
        "password of the user", "npm_config_cache", "pypi-server", "SG.x", "AIzawa",
        "sk_live_demo",
        "smbclient -U ada //h/s", "passin pass:1", "jwt decoding", "mpw=3",
    ],
)  # fmt: skip
def test_no_harmless_form_is_hidden(text: str) -> None:
    assert redact(f"first line\n{text}\nlast line") == f"first line\n{text}\nlast line"


VALUES = st.text("abcXYZ019_-+/.~%!?#@$^*|", min_size=6, max_size=30).map(lambda it: f"q{it}")
ANYTHING = st.text(max_size=20) | st.sampled_from(["(", "{'a': 1, '", "?", "f(", "x=1&", "@", '"'])
FORMS = st.sampled_from(
    [
        "{n}={v}", "{n}='{v}'", '{n}="{v}"', "{n}: {v}", "{n} = {v}", "'{n}': '{v}'",
        '"{n}": "{v}"', r"\"{n}\": \"{v}\"", "--{n} {v}", "--{n}={v}", "?{n}={v}", "{n} => {v}",
        "x://ada:{v}@host", "('{n}', '{v}')", "export {n}={v}", "{n}:={v}", "d['{n}'] = '{v}'",
    ]
)  # fmt: skip


@given(VALUES, st.sampled_from(NAMES), FORMS, ANYTHING, ANYTHING)
def test_no_secret_survives_in_any_context(
    value: str, name: str, form: str, before: str, after: str
) -> None:
    # A word that is longer because of its neighbours has another name, or is an address.
    text = f"{before} {form.format(n=name, v=value)} {after}"
    shown = redact(text)
    assert value not in shown.replace(before, "").replace(after, "")


@given(st.text("a!&;,)]}'([{\"", max_size=12), st.sampled_from(["", "q"]))
def test_punctuation_ends_no_value(inside: str, first: str) -> None:
    assert "z" not in redact(f"DB_PASS={first}{inside}z and more")


@given(
    st.text(min_size=6, max_size=30).filter(lambda it: it.strip() not in HIDDEN),
    st.sampled_from(["TOKEN", "DB_PASS", "GITHUB_PAT"]),
    st.sampled_from(
        [str, urllib.parse.quote, urllib.parse.quote_plus, json.dumps, repr,
         lambda it: urllib.parse.quote(it, safe="")]
    ),
    ANYTHING,
    ANYTHING,
)  # fmt: skip
def test_value_of_a_variable_is_hidden_anywhere(
    value: str, name: str, write: object, before: str, after: str
) -> None:
    try:
        assert callable(write)
        text = f"{before}{write(value)}{after}"
        value.encode()
        os.environ[name] = value
    except (UnicodeEncodeError, ValueError):  # no value of a variable
        return
    assert value not in redact(text) or value in HIDDEN


def test_only_the_password_of_a_variables_url_is_hidden() -> None:
    os.environ["DATABASE_URL"] = "postgres://ada:ca%2Fnary-pw@host/db"
    assert redact("refused ca/nary-pw, ca%2Fnary-pw") == "refused [hidden], [hidden]"


def test_longer_of_two_values_is_hidden_first() -> None:
    os.environ |= {"DB_PASSWORD": "in-env", "HUB_TOKEN": "in-env-and-more", "SHORT_KEY": "abc"}
    assert redact("longer: in-env-and-more.") == "longer: [hidden]."
    assert redact("password=in-env-and-others") == "password=[hidden]"
    assert redact("abc") == "abc"
    os.environ["PWD"] = "/home/ada"
    assert redact("in /home/ada") == "in /home/ada"


def test_each_line_of_a_variable_is_hidden() -> None:
    os.environ["SSH_PRIVATE_KEY"] = "-----BEGIN-----\nbody-of-it\n"
    assert redact("it has body-of-it") == "it has [hidden]"


def test_truncated_text_ends_in_no_part_of_a_secret() -> None:
    os.environ["HUB_TOKEN"] = CANARY
    text = f"{'-' * 90}{CANARY} and more"
    assert redact_clipped(text, 1000) == f"{'-' * 90}[hidden] and more"
    for limit in range(60, 101):
        assert CANARY[:3] not in redact_clipped(text, limit)
        assert len(redact_clipped(text, limit)) <= limit + 1


@given(st.text())
def test_redaction_is_idempotent(text: str) -> None:
    assert redact(redact(text)) == redact(text)


PATTERNS = (
    *"-a'\"=:/@\\[({_.?&,; p\n", "a_", "://", "password", "key=", "Bearer ", "Basic ", "token=",
    "password='", 'password="""', "--token x ", "- ", "secret", "a://a/", "a@", "://@", "cookie: ",
    "?sig=a&", '"password", ', "password=x,", "password=(", "--" + "a" * 50 + " ", "İ",
    "password" + " " * 50, "password\\", "authorization:'", "password=[x](", "key='",
    "-p", "mysql ", "mysql -p", "password a1 ", "password for ", "token is ", "curl -u ",
    "'auth':", "sshpass -p ", "-pa!", "docker login ",
    "password:\n  ", "password: |\n a\n", "api_key:\n- a\n", "password=[\n", "token:\n'", "//a:",
    ":\\/\\/a",
    "%3a%2f%2fa", "PASS a1\n", "AUTH a ", "HTTPBasicAuth(a", "identified by ", "| password |",
    "password of ",
    "password for a", "wandb login --a ", "auth=a:",
    "token=[1,", "key=[1 ", "smbclient -U a", "-passin pass:", "SG.a", "\xa0", "npm_", "pypi-a",
    "hf_", "ghp_a", "sk-", "sk-proj-", "eyJ", "eyJ" + "a" * 10 + ".", "eyJ.eyJ.", "xoxb-", "AKIA",
)  # fmt: skip


def _seconds(text: str) -> float:
    start = time.process_time()
    redact(text)
    return time.process_time() - start


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("end", ["", "@"])
def test_time_is_linear_in_the_text(pattern: str, end: str) -> None:
    """Eight times the text takes about eight times as long, where a quadratic pattern takes 64
    times; times that are too short to be compared pass.
    """
    short, long = (pattern * (size // len(pattern)) + end for size in (20_000, 160_000))
    assert any(_seconds(long) < 24 * _seconds(short) + 0.05 for _ in range(3))
