"""Text: the tokenizer of a folder, incremental decoding, stop strings and chat templates."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import seawall
from seawall.core.errors import ConfigError, RequestError
from seawall.text.detokenizer import IncrementalDetokenizer, StopMatch
from seawall.text.stop_strings import StopFinder
from seawall.text.stream import ByteStream, WindowStream, open_stream
from seawall.text.tokenizer import Tokenizer

DEMO = Path(seawall.__file__).parent / "demo_model"
SPACE = "\u2581"
# Printable words, an accent, Chinese, and an emoji of one and of several code points.
HARD_TEXT = "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600 \U0001f469\u200d\U0001f52c end"


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO)


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """A vocabulary in the manner of SentencePiece: pieces, and one token for each byte."""
    pieces = [("<s>", 0.0), ("</s>", 0.0), *[(f"<0x{byte:02X}>", -9.0) for byte in range(256)]]
    words = [SPACE, f"{SPACE}Hi", "Hi", "a", "b", f"{SPACE}there", "!"]
    pieces += [(word, -1.0) for word in words]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def word_piece_backend() -> tokenizers.Tokenizer:
    vocab = ["[UNK]", "[CLS]", "[SEP]", "play", "##ing", "the", "piano"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(vocab)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return backend


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(
        write_folder(tmp_path_factory.mktemp("fallback"), byte_fallback_backend())
    )


@pytest.fixture(scope="module")
def word_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("pieces"), word_piece_backend()))


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each UTF-8 byte of the text (byte-level vocabularies)."""
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def stream_all(detokenizer: IncrementalDetokenizer, ids: Sequence[int], step: int = 1) -> str:
    parts = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return "".join(parts) + detokenizer.finish()


class TestTokenizer:
    def test_demo_ids(self, demo: Tokenizer) -> None:
        assert (demo.bos_id, demo.eos_id, demo.eos_ids) == (6, 1, (1, 5))
        assert demo.vocab_size == 4096
        assert demo.num_special_tokens == 1
        assert demo.is_byte_level

    def test_encode_uses_the_template_of_the_tokenizer(self, demo: Tokenizer) -> None:
        plain = demo.encode("Once upon a time", add_special_tokens=False)
        assert demo.encode("Once upon a time") == [6, *plain]
        assert demo.encode_batch(["Once upon a time", ""]) == [[6, *plain], [6]]

    @given(st.text())
    def test_decode_gives_back_any_text(self, demo: Tokenizer, text: str) -> None:
        assert demo.decode(demo.encode(text, add_special_tokens=False)) == text

    def test_reference_prompts_have_the_ids_of_transformers(self, demo: Tokenizer) -> None:
        reference = json.loads((DEMO / "reference.json").read_text(encoding="utf-8"))
        prompts = reference["prompts"]
        assert prompts
        for prompt in prompts:
            ids = prompt["token_ids"]
            assert demo.encode(prompt["text"], add_special_tokens=False) == ids
            assert demo.decode(ids, skip_special_tokens=False) == prompt["text"]

    def test_surrogates_and_bad_ids_are_the_callers_fault(self, demo: Tokenizer) -> None:
        with pytest.raises(RequestError, match="U\\+D800"):
            demo.encode_batch(["fine", "a\ud800b"])
        with pytest.raises(RequestError, match="outside 0"):
            demo.decode([5, -1])
        with pytest.raises(RequestError, match="outside 0"):
            demo.decode([2**40])
        assert demo.decode([4096, 999_999]) == ""

    def test_special_tokens_in_the_text_of_ids(self, demo: Tokenizer) -> None:
        ids = [6, *demo.encode("A", add_special_tokens=False), 5]
        assert demo.decode(ids) == "A"
        assert demo.decode(ids, skip_special_tokens=False) == "<|begin_of_text|>A<|end|>"

    def test_token_text_keeps_the_leading_space(self, demo: Tokenizer, fallback: Tokenizer) -> None:
        ids = demo.encode("went home", add_special_tokens=False)
        assert "".join(demo.token_text(i) for i in ids) == "went home"
        assert demo.token_text(5) == "<|end|>"
        assert demo.token_text(4096) == ""
        piece = fallback.encode("Hi there")
        assert [fallback.token_text(i) for i in piece][-1] == " there"
        byte = byte_ids(demo, "\u00e9")[0]
        assert demo.token_text(byte) == "\ufffd"

    def test_folder_without_tokenizer_names_the_fix(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="skip_tokenizer_init=True") as caught:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("content", ["{}", "[", '{"version": "1.0"}'])
    def test_broken_tokenizer_file(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match="no tokenizer that"):
            Tokenizer.load(tmp_path)

    def test_broken_settings_file(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, word_piece_backend())
        (folder / "tokenizer_config.json").write_text("{")
        with pytest.raises(ConfigError, match="not JSON"):
            Tokenizer.load(folder)
        (folder / "tokenizer_config.json").write_text("[]")
        with pytest.raises(ConfigError, match="not an object"):
            Tokenizer.load(folder)

    def test_ends_are_gathered_from_every_file(self, tmp_path: Path) -> None:
        folder = write_folder(
            tmp_path,
            word_piece_backend(),
            tokenizer_config={"eos_token": {"content": "[SEP]"}},
            generation_config={"eos_token_id": [5, 6], "bos_token_id": 4},
            config={"eos_token_id": 3, "text_config": {"eos_token_id": 0}},
        )
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.eos_ids == (0, 2, 5, 6)
        assert tokenizer.eos_id == 2
        assert tokenizer.bos_id == 4

    def test_tokenizer_that_names_no_begin_token_has_none(self, tmp_path: Path) -> None:
        folder = write_folder(
            tmp_path,
            word_piece_backend(),
            tokenizer_config={"bos_token": None},
            config={"bos_token_id": 4, "eos_token_id": [6, 3]},
        )
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.bos_id is None
        assert tokenizer.eos_id == 6

    def test_special_tokens_map_is_read(self, tmp_path: Path) -> None:
        folder = write_folder(
            tmp_path,
            word_piece_backend(),
            special_tokens_map={"bos_token": "[CLS]", "eos_token": {"content": "[SEP]"}},
        )
        tokenizer = Tokenizer.load(folder)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)

    def test_truncation_and_padding_of_the_file_are_ignored(self, tmp_path: Path) -> None:
        backend = word_piece_backend()
        backend.enable_truncation(max_length=1)
        backend.enable_padding(length=8)
        tokenizer = Tokenizer.load(write_folder(tmp_path, backend))
        assert tokenizer.encode("the piano playing") == [5, 6, 3, 4]


class TestStream:
    @given(
        ids=st.lists(st.integers(0, 4200), max_size=60),
        step=st.integers(1, 7),
        skip=st.booleans(),
    )
    def test_any_ids_give_the_text_of_decode(
        self, demo: Tokenizer, ids: list[int], step: int, skip: bool
    ) -> None:
        detokenizer = IncrementalDetokenizer(demo, skip_special_tokens=skip)
        text = stream_all(detokenizer, ids, step)
        assert text == demo.decode(ids, skip_special_tokens=skip)
        assert detokenizer.num_tokens == len(ids)

    def test_every_token_gives_the_text_of_decode(self, demo: Tokenizer) -> None:
        ids = list(range(demo.vocab_size))
        for some in (ids, ids[::-1]):
            text = stream_all(IncrementalDetokenizer(demo, skip_special_tokens=False), some)
            assert text == demo.decode(some, skip_special_tokens=False)
        assert b"".join(demo.token_bytes(i) for i in ids).decode(errors="replace") == demo.decode(
            ids, skip_special_tokens=False
        )

    @given(data=st.data(), skip=st.booleans())
    def test_any_bytes_give_the_text_of_decode(
        self, demo: Tokenizer, data: st.DataObject, skip: bool
    ) -> None:
        """Bytes drawn one by one, with special tokens between the bytes of a character."""
        singles = [i for i in range(270) if len(demo.token_bytes(i)) == 1]
        ids = data.draw(
            st.lists(st.one_of(st.sampled_from(singles), st.integers(0, 6)), max_size=40)
        )
        detokenizer = IncrementalDetokenizer(demo, skip_special_tokens=skip)
        assert stream_all(detokenizer, ids) == demo.decode(ids, skip_special_tokens=skip)

    def test_half_a_character_is_never_given_out(self, demo: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(demo)
        shown = [detokenizer.push([i]) for i in byte_ids(demo, "a\U0001f600b")]
        assert shown == ["a", "", "", "", "\U0001f600", "b"]
        assert detokenizer.finish() == ""

    def test_incomplete_character_is_replaced_at_the_end(self, demo: Tokenizer) -> None:
        ids = byte_ids(demo, "a\U0001f600")[:-1]
        detokenizer = IncrementalDetokenizer(demo)
        assert detokenizer.push(ids) == "a"
        assert detokenizer.finish() == "\ufffd" == demo.decode(ids)[1:]

    def test_every_prefix_of_a_byte_fallback_text(self, fallback: Tokenizer) -> None:
        hard = fallback.encode(HARD_TEXT)
        detokenizer = IncrementalDetokenizer(fallback)
        assert stream_all(detokenizer, hard) == fallback.decode(hard) == HARD_TEXT
        half = fallback.encode("Hi") + [2 + byte for byte in "\u4f60".encode()[:2]]
        assert stream_all(IncrementalDetokenizer(fallback), half) == fallback.decode(half)

    @given(
        words=st.lists(
            st.sampled_from(["Hi", " Hi", " ", " there", "!", "\u4f60", "\u00e9", "\U0001f600"]),
            max_size=25,
        ),
        junk=st.lists(st.integers(2, 257), max_size=3),
        step=st.integers(1, 5),
    )
    def test_byte_fallback_gives_the_text_of_decode(
        self, fallback: Tokenizer, words: list[str], junk: list[int], step: int
    ) -> None:
        """Well-formed text, then a token of its own, then bytes that may be anything."""
        vocab = {fallback.token_text(i): i for i in range(258, fallback.vocab_size)}
        ids: list[int] = []
        for word in words:
            one = vocab.get(word)
            ids += [one] if one is not None else [2 + byte for byte in word.encode()]
        ids += [vocab["!"], *junk]
        text = stream_all(IncrementalDetokenizer(fallback), ids, step)
        whole = fallback.decode(ids)
        # Junk bytes may begin with a whole character that was rightly given out (see stream.py).
        cut = whole.rindex("!") + 1
        assert text[:cut] == whole[:cut]
        if "\ufffd" not in text[cut:]:
            assert text == whole

    def test_malformed_byte_run_keeps_what_was_given_out(self, fallback: Tokenizer) -> None:
        good = [2 + byte for byte in "\u4f60".encode()]
        detokenizer = IncrementalDetokenizer(fallback)
        assert [detokenizer.push([i]) for i in good] == ["", "", "\u4f60"]
        assert detokenizer.push([2 + 0xFF]) + detokenizer.finish() == "\ufffd"

    def test_first_space_is_dropped_once(self, fallback: Tokenizer) -> None:
        ids = fallback.encode("Hi there Hi")
        detokenizer = IncrementalDetokenizer(fallback)
        assert [detokenizer.push([i]) for i in ids] == ["Hi", " there", " Hi"]
        for spaces in range(4):
            ids = [258] * spaces + [259]
            text = stream_all(IncrementalDetokenizer(fallback), ids)
            assert text == fallback.decode(ids) == " " * spaces + "Hi"

    def test_special_tokens_leave_no_trace(self, fallback: Tokenizer) -> None:
        ids = [0, 259, 1, 0, 263, 1]
        assert stream_all(IncrementalDetokenizer(fallback), ids) == fallback.decode(ids)
        kept = IncrementalDetokenizer(fallback, skip_special_tokens=False)
        assert stream_all(kept, ids) == fallback.decode(ids, skip_special_tokens=False)

    @given(ids=st.lists(st.integers(0, 8), max_size=30), spaces=st.booleans(), skip=st.booleans())
    def test_word_pieces_give_the_text_of_decode(
        self, word_piece: Tokenizer, ids: list[int], spaces: bool, skip: bool
    ) -> None:
        detokenizer = IncrementalDetokenizer(
            word_piece, skip_special_tokens=skip, spaces_between_special_tokens=spaces
        )
        assert stream_all(detokenizer, ids) == word_piece.decode(ids, skip, spaces)

    def test_spaces_between_special_tokens(self, word_piece: Tokenizer) -> None:
        ids = [1, 7, 2, 3, 4, 1]
        assert word_piece.decode(ids, False, True) == "[CLS] [SEP] playing [CLS]"
        assert word_piece.decode(ids, False, False) == "[CLS][SEP] playing [CLS]"
        detokenizer = IncrementalDetokenizer(
            word_piece, skip_special_tokens=False, spaces_between_special_tokens=False
        )
        assert stream_all(detokenizer, ids) == "[CLS][SEP] playing [CLS]"

    def test_tokens_without_text(self, tmp_path: Path) -> None:
        """They neither grow the state nor take the place of the context before them."""
        backend = byte_fallback_backend()
        backend.decoder = decoders.Sequence([decoders.Replace("!", ""), backend.decoder])
        tokenizer = Tokenizer.load(write_folder(tmp_path, backend))
        word, empty = 259, 264
        assert tokenizer.decode([empty]) == ""
        for ids in ([word, empty, word], [word, *[empty] * 100, word], [*[empty] * 100, word]):
            stream = WindowStream(tokenizer, True, True)
            text = ""
            for token_id in ids:
                text += stream.push(token_id)
                assert len(stream._window) <= 16
            assert text + stream.finish() == tokenizer.decode(ids)

    def test_cost_is_linear_and_state_small(
        self, demo: Tokenizer, fallback: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decoded = []

        def counting(self: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
            decoded.append(len(ids))
            return original(self, ids, skip_special_tokens)

        original = Tokenizer.decode
        monkeypatch.setattr(Tokenizer, "decode", counting)
        assert isinstance(open_stream(demo, True, True), ByteStream)
        stream = open_stream(fallback, True, True)
        assert isinstance(stream, WindowStream)
        ids = [259, 258, 2 + 0xE4, 2 + 0xBD, 2 + 0xA0, *[2 + 0xFF] * 20, 0, 263] * 100
        for token_id in ids:
            stream.push(token_id)
        assert max(decoded) <= 8
        assert sum(decoded) <= 10 * len(ids)


def stop_oracle(text_of: list[str], stops: list[str]) -> tuple[int, str, int] | None:
    """(tokens, matched, end) by trying every end in every prefix; text_of[k] is k tokens' text."""
    for num_tokens in range(1, len(text_of)):
        text = text_of[num_tokens]
        for end in range(len(text_of[num_tokens - 1]) + 1, len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found:
                return num_tokens, max(found, key=len), end
    return None


def held_back(text: str, stops: list[str]) -> int:
    """The longest end of the text that is a proper beginning of a stop string."""
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )


class TestStopStrings:
    @given(
        words=st.lists(st.sampled_from(["a", "b", "c", "an", "the", "ab", "ba"]), max_size=25),
        stops=st.lists(st.text("abct", min_size=1, max_size=5), max_size=4),
        keep=st.booleans(),
        step=st.integers(1, 4),
    )
    def test_equal_to_trying_every_end(
        self, demo: Tokenizer, words: list[str], stops: list[str], keep: bool, step: int
    ) -> None:
        ids = [i for word in words for i in demo.encode(word, add_special_tokens=False)]
        text_of = [demo.decode(ids[:k]) for k in range(len(ids) + 1)]
        expected = stop_oracle(text_of, stops)
        detokenizer = IncrementalDetokenizer(demo, stop=stops, no_stop_trim=keep)
        shown = ""
        for i in range(0, len(ids), step):
            shown += detokenizer.push(ids[i : i + step])
            if detokenizer.match is None:
                text = text_of[min(i + step, len(ids))]
                assert shown == text[: len(text) - held_back(text, stops)]
        shown += detokenizer.finish()
        if expected is None:
            assert detokenizer.match is None
            assert shown == text_of[-1]
            return
        num_tokens, matched, end = expected
        assert detokenizer.match == StopMatch(num_tokens=num_tokens, matched=matched)
        assert shown == text_of[-1][: end if keep else end - len(matched)]
        assert detokenizer.num_tokens == num_tokens

    @example(stop="aabaaaa", text="aabaaabaaaa")
    @given(stop=st.text("ab", min_size=1, max_size=9), text=st.text("ab", max_size=60))
    def test_periodic_stop_strings(self, stop: str, text: str) -> None:
        """Stop strings that repeat themselves, character by character."""
        finder = StopFinder((stop,))
        for end in range(1, len(text) + 1):
            hit = finder.feed(text[end - 1])
            assert (hit is not None) == text[:end].endswith(stop)
            if hit is not None:
                return
            assert finder.num_held == held_back(text[:end], [stop])

    def test_across_tokens_and_nothing_past_it(self, demo: Tokenizer) -> None:
        ids = byte_ids(demo, "one\n\nQ: two")
        detokenizer = IncrementalDetokenizer(demo, stop=("\n\nQ:",))
        assert detokenizer.push(ids) == "one"
        assert detokenizer.match == StopMatch(num_tokens=7, matched="\n\nQ:")
        assert detokenizer.push(ids) == detokenizer.finish() == ""
        assert detokenizer.num_tokens == 7

    def test_false_beginning_is_given_out_later(self, demo: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(demo, stop=("aab",))
        shown = [detokenizer.push([i]) for i in byte_ids(demo, "xaaac")]
        assert shown == ["x", "", "", "a", "aac"]
        assert detokenizer.match is None

    def test_held_text_comes_with_the_end(self, demo: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(demo, stop=("END.",))
        assert detokenizer.push(byte_ids(demo, "the EN\u00e9")[:-1]) == "the "
        assert detokenizer.finish() == "EN\ufffd"

    @pytest.mark.parametrize("stop", ["\u00e9", "\U0001f600", "\u4f60\u597d"])
    def test_outside_ascii(self, demo: Tokenizer, stop: str) -> None:
        ids = byte_ids(demo, f"go {stop} on")
        detokenizer = IncrementalDetokenizer(demo, stop=(stop,))
        assert detokenizer.push(ids) == "go "
        completing = 3 + len(stop.encode())
        assert detokenizer.match == StopMatch(num_tokens=completing, matched=stop)

    def test_one_character_in_the_middle_of_a_token(self, demo: Tokenizer) -> None:
        (the,) = demo.encode(" the", add_special_tokens=False)
        trimmed = IncrementalDetokenizer(demo, stop=("h",))
        assert trimmed.push([the, the]) == " t"
        kept = IncrementalDetokenizer(demo, stop=("h",), no_stop_trim=True)
        assert kept.push([the, the]) == " th"
        assert kept.match == trimmed.match == StopMatch(num_tokens=1, matched="h")

    def test_earliest_end_then_longest(self, demo: Tokenizer) -> None:
        ids = byte_ids(demo, "xabcd")
        for stops, matched, text in (
            (("abcd", "bc"), "bc", "xa"),
            (("c", "abc", "bc"), "abc", "x"),
        ):
            detokenizer = IncrementalDetokenizer(demo, stop=stops)
            assert detokenizer.push(ids) == text
            assert detokenizer.match == StopMatch(num_tokens=4, matched=matched)

    def test_special_tokens_match_only_where_they_are_text(self, demo: Tokenizer) -> None:
        ids = [*byte_ids(demo, "a"), 5, *byte_ids(demo, "b")]
        skipped = IncrementalDetokenizer(demo, stop=("<|end|>",))
        assert stream_all(skipped, ids) == "ab"
        kept = IncrementalDetokenizer(demo, stop=("<|end|>",), skip_special_tokens=False)
        assert stream_all(kept, ids) == "a"
        assert kept.match == StopMatch(num_tokens=2, matched="<|end|>")

    def test_first_tokens_can_be_left_out(self, demo: Tokenizer) -> None:
        ids = byte_ids(demo, "abab")
        detokenizer = IncrementalDetokenizer(demo, stop=("ab",), min_tokens=1)
        assert detokenizer.push(ids) == "ab"
        assert detokenizer.match == StopMatch(num_tokens=4, matched="ab")

    def test_empty_stop_string_is_refused(self, demo: Tokenizer) -> None:
        with pytest.raises(RequestError, match="empty string"):
            IncrementalDetokenizer(demo, stop=("x", ""))

    def test_state_is_bounded_by_the_stop_string(self) -> None:
        finder = StopFinder(("a" * 50 + "b",))
        for _ in range(500):
            assert finder.feed("aaa") is None
        assert finder.num_held == 50
        hit = finder.feed("b!")
        assert hit is not None
        assert hit.end == 1


class TestChat:
    def test_demo_template(self, demo: Tokenizer) -> None:
        messages = [
            {"role": "system", "content": " Be kind. "},
            {"role": "user", "content": "Hello"},
        ]
        text = demo.apply_chat_template(messages, add_generation_prompt=True)
        assert text == "<|begin_of_text|><|system|>Be kind.<|end|><|user|>Hello<|end|><|assistant|>"
        assert demo.encode(text, add_special_tokens=False)[:2] == [6, 4]
        assert demo.chat_template is not None
        assert "<|assistant|>" in demo.chat_template

    def test_refusal_of_the_template_is_a_request_error(self, demo: Tokenizer) -> None:
        with pytest.raises(RequestError, match="Unknown role: robot"):
            demo.apply_chat_template([{"role": "robot"}], add_generation_prompt=True)
        with pytest.raises(RequestError, match="messages"):
            demo.apply_chat_template([{"role": 3, "content": 4}], add_generation_prompt=False)

    def test_no_template(self, word_piece: Tokenizer) -> None:
        with pytest.raises(RequestError, match="no chat template"):
            word_piece.apply_chat_template([], add_generation_prompt=True)

    def load(self, folder: Path, template: object) -> Tokenizer:
        settings = {"chat_template": template, "eos_token": "[SEP]"}
        return Tokenizer.load(write_folder(folder, word_piece_backend(), tokenizer_config=settings))

    def test_globals_filters_and_variables(self, tmp_path: Path) -> None:
        tokenizer = self.load(
            tmp_path,
            "{{ tools | tojson }}|{{ strftime_now('%Y') | length }}|{{ mood }}|{{ eos_token }}|"
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
            "{% if loop.first %}{% break %}{% endif %}{% endfor %}",
        )
        text = tokenizer.apply_chat_template(
            [{"content": "one"}, {"content": "two"}],
            add_generation_prompt=False,
            tools=[{"name": "<f>\u00e9"}],
            variables={"mood": "calm", "messages": "not these"},
        )
        assert text == '[{"name": "<f>\u00e9"}]|4|calm|[SEP]|one'

    def test_sandbox(self, tmp_path: Path) -> None:
        for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"):
            tokenizer = self.load(tmp_path, source)
            with pytest.raises(RequestError, match="unsafe"):
                tokenizer.apply_chat_template([], add_generation_prompt=False)

    def test_named_templates(self, tmp_path: Path) -> None:
        tokenizer = self.load(
            tmp_path,
            [
                {"name": "default", "template": "plain"},
                {"name": "tool_use", "template": "with tools"},
            ],
        )
        assert tokenizer.apply_chat_template([], add_generation_prompt=True) == "plain"
        text = tokenizer.apply_chat_template([], add_generation_prompt=True, tools=[{"a": 1}])
        assert text == "with tools"

    def test_file_wins_over_settings(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_text("from the file")
        tokenizer = self.load(tmp_path, "from the settings")
        assert tokenizer.apply_chat_template([], add_generation_prompt=True) == "from the file"

    def test_broken_template_is_found_at_load(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="not valid jinja2"):
            self.load(tmp_path, "{% if %}")
