"""Forms are read as the engines' parser reads them; what two parsers could read differently is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fuzzing.inputs import CORPUS
from proxy.core.errors import BadRequest
from proxy.openai.multipart import LONGEST_HEAD, MOST_LINES, MOST_PARTS, STEP, Form, model_of, with_model

RECORDED = CORPUS / "multipart"
KIND = "multipart/form-data; boundary=B"
FILE = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
END = b"--B--\r\n"


def part(disposition: bytes, value: bytes = b"a", *lines: bytes) -> bytes:
    head = b"\r\n".join((b"content-disposition: form-data; " + disposition, *lines))
    return b"--B\r\n" + head + b"\r\n\r\n" + value + b"\r\n"


MODEL = part(b'name="model"')


@pytest.mark.parametrize(
    "form",
    [
        MODEL + FILE + END,
        FILE + MODEL + END,
        b"\r\n" + MODEL + FILE + END,
        part(b"name=model") + FILE + END,
        part(b'name="model"', b"a", b"Content-Type: text/plain; charset=UTF-8") + END,
        part(b'name="model"', b"a", b"Content-Type: text/plain; charset=ISO-8859-1", b"Content-Transfer-Encoding: 8bit")
        + END,
        part(b"name=model", b"a", b'Content-Type: text/plain; charset="utf-8"', b"Content-Length: 1") + END,
        part(b"name=file; filename=a.wav; filename*=utf-8''a.wav") + MODEL + END,
        part(b'name="file"; filename="a;b.wav"') + MODEL + END,
        part(b'name="file"; filename="\\"; name=\\"model.wav"') + MODEL + END,
        part(b'name="file"; filename="caf.wav"; filename*=UTF-8\'\'caf%C3%A9.wav') + MODEL + END,
        part(b'name="file"; filename="C:\\a.wav"') + MODEL + END,
        MODEL + END + b"--B\r\n" + MODEL,
    ],
)
def test_forms_of_real_clients_are_parsed(form: bytes) -> None:
    assert model_of(form, KIND) == "a"


@pytest.mark.parametrize("client", sorted(path.name for path in RECORDED.glob("client-*")))
def test_forms_are_parsed_as_clients_send_them(client: str) -> None:
    """With a file whose name has quotes, a semicolon and an accent, where the client allows it."""
    kind, _, form = (RECORDED / client).read_bytes().partition(b"\n")
    assert model_of(form, kind.decode()) == "a"
    renamed = with_model(form, kind.decode(), "other")
    assert renamed is not None
    assert model_of(renamed, kind.decode()) == "other"
    assert renamed.replace(b"\r\n\r\nother\r\n", b"\r\n\r\na\r\n") == form


def test_an_empty_model_field_names_no_model() -> None:
    assert model_of(part(b'name="model"', b"") + FILE + END, KIND) is None
    assert model_of(FILE + END, KIND) is None


def test_spaces_belong_to_the_model_name() -> None:
    assert model_of(part(b'name="model"', b" a ") + END, KIND) == " a "


@pytest.mark.parametrize(
    "form",
    [
        MODEL + part(b'name="model"', b"secret") + FILE + END,
        part(b'x=" name=model"; name="prompt"') + part(b'name="mod\\el"', b"secret") + END,
        part(b'name="prompt"; name="model"') + END,
        part(b"name*=utf-8''model") + END,
        part(b'name*0="mod"; name*1="el"') + END,
        part(b'name="x"; filename="a\\\\"; name="model"') + END,
        part(b'name="model"; filename="a"') + END,
        part(b"name=<model>") + END,
        part(b'name="model"', b"YQ==", b"content-transfer-encoding: base64") + END,
        part(b'name="model"', b"YQ==", b"content-transfer-encoding: base64", b"content-transfer-encoding: 7bit") + END,
        part(b'name="model"', b"a", b"content-type: text/plain; charset=utf-16") + END,
        part(b'name="model"', b"a", b"content-type: text/plain; charset=utf-16; x=utf-8") + END,
        part(b'name="model"', b"\xc3\xa9", b"content-type: text/plain; charset=iso-8859-1") + END,
        MODEL + part(b"name=model\xa0", b"secret") + END,
        MODEL + part(b"name=\x85model", b"secret") + END,
        MODEL + part(b"name=\x1cmodel", b"secret") + END,
        part(b'name="x"', b"--B\r\n" + MODEL[5:-2]) + END,
        part(b'name="x"', b"a", b'content-disposition: form-data; name="model"') + END,
        part(b'name="x"', b"a", b" folded: line") + END,
        part(b'name="x"', b"a", b'x: y\ncontent-disposition: form-data; name="model"') + END,
        part(b'name="model"', b"\xff") + END,
        b"preamble\r\n" + MODEL + END,
        b"--B\r\n\r\nno header\r\n" + MODEL + END,
        b"--B \r\n" + MODEL[5:] + END,
        MODEL + b"--Bx\r\n" + END,
        MODEL + FILE,
        b"",
        b'{"model":"a"}',
        part(b'name="x"', b"a", b"x: " + b"y" * LONGEST_HEAD) + END,
        part(b'name="x"', b"a", *[b"a:"] * MOST_LINES) + END,
        part(b'name="x"; a=1; b=1; c=1; d=1; e=1; f=1; g=1; h=1') + END,
        part(b'name="x"') * (MOST_PARTS + 1) + END,
        b"\r\n" * 100 + MODEL + END,
        b"\n\n\n" + MODEL + END,
    ],
)
def test_ambiguous_forms_are_refused(form: bytes) -> None:
    with pytest.raises(BadRequest):
        model_of(form, KIND)


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=A; boundary=B",
        "multipart/form-data; boundary*=utf-8''B",
        "multipart/form-data; boundary=B; charset=utf-16",
        "multipart/form-data; boundary=B, application/json",
        'multipart/form-data; x=";boundary=A"y; boundary=B',
        'multipart/form-data; x=";boundary=A;"; boundary=B',
        "multipart/mixed; boundary=B",
    ],
)
def test_a_content_type_without_a_single_boundary_is_refused(kind: str) -> None:
    with pytest.raises(BadRequest):
        model_of(MODEL + FILE + END, kind)


def test_a_parameter_that_ends_like_boundary_is_ignored() -> None:
    assert model_of(MODEL + FILE + END, "multipart/form-data; xboundary=A; boundary=B") == "a"


@given(st.lists(st.integers(1, 40), max_size=40))
def test_forms_are_parsed_with_any_splits(sizes: list[int]) -> None:
    form, reader, at = FILE + MODEL + FILE + END, Form(KIND), 0
    for size in sizes:
        reader.feed(form[at : at + size])
        at += size
    reader.feed(form[at:])
    reader.finish()
    assert reader.place is not None
    assert (reader.model, form[slice(*reader.place)]) == ("a", b"a")


def test_a_boundary_across_two_steps_of_a_large_form_is_found() -> None:
    start = part(b'name="file"; filename="a"', b"")[:-2]
    for size in range(STEP - 12, STEP + 4):
        form = start + b"x" * (size - len(start)) + b"\r\n" + MODEL + END
        assert model_of(form, KIND) == "a"
