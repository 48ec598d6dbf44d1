"""Self-sampled dialogues: what they look like, and that no interruption changes them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tiny_model import CHAT_TEMPLATE, byte_tokenizer
from toy_language import END, ToyLanguage

from outrider.draft.distill.chat_frame import ChatFrame, read_chat_frame
from outrider.draft.distill.conversations import Conversation, ConversationSampler
from outrider.draft.distill.corpus import Corpus
from outrider.draft.distill.generation import CorpusFailed, Generation
from outrider.draft.distill.progress import Progress
from outrider.draft.distill.settings import DistillSettings
from outrider.verify.checkpoint.chat_template import ChatTemplate
from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.tokenizer import Tokenizer

SETTINGS = DistillSettings(seed=5, max_turn_tokens=40, max_answer_tokens=20)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), [END])


@pytest.fixture(scope="module")
def frame(tokenizer: Tokenizer) -> ChatFrame:
    return read_chat_frame(ChatTemplate(CHAT_TEMPLATE), tokenizer, [END])


class Making:
    """Makes one corpus in ``path``, perhaps in several runs."""

    def __init__(self, path: Path, frame: ChatFrame, tokenizer: Tokenizer) -> None:
        self.path, self.frame, self.tokenizer = path, frame, tokenizer
        self.reports: list[Progress] = []

    def run(self, language: ToyLanguage, max_tokens: int = 0, max_seconds: float = 60.0) -> list[Conversation]:
        with Corpus(self.path) as corpus:
            sampler = ConversationSampler(self.frame, self.tokenizer, SETTINGS)
            generation = Generation(sampler, corpus, max_tokens, max_seconds)
            generation.run(language, self.reports.append)
            return generation.conversations


@pytest.fixture
def making(tmp_path: Path, frame: ChatFrame, tokenizer: Tokenizer) -> Making:
    return Making(tmp_path / "conversations.jsonl", frame, tokenizer)


def test_the_frame_is_what_the_template_writes_around_the_words(tokenizer: Tokenizer, frame: ChatFrame) -> None:
    dialogue = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    wanted = ChatTemplate(CHAT_TEMPLATE).encode([*dialogue, {"role": "user", "content": "c"}], tokenizer)
    a, b, c = (tuple(tokenizer.encode(letter)) for letter in "abc")
    found = frame.before + a + frame.to_answer + frame.after_answer((*b, END)) + c + frame.to_answer
    assert list(found) == wanted
    assert frame.after_answer(b) == frame.after_answer((*b, END)), "an answer that was cut is ended all the same"
    assert frame.end_token_ids == (END,)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (None, "no chat template"),
        ("{{ messages[-1]['content'] }}", "one after another"),
        ("{{ nothing() }}", "sampled"),
    ],
)
def test_a_model_that_cannot_be_asked_for_questions_is_refused(
    source: str | None, problem: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=problem):
        read_chat_frame(ChatTemplate(source), tokenizer, [END])


def test_conversations_follow_the_template_and_their_turns_are_the_targets_words(
    making: Making, frame: ChatFrame, tokenizer: Tokenizer
) -> None:
    language = ToyLanguage()
    conversations = making.run(language, max_tokens=2000)
    said = {(prompt.token_ids, language.continuation(prompt).token_ids) for prompt in language.prompts}
    meant = {(context, frame.without_end(words)) for context, words in said}
    assert {len(conversation.turns) for conversation in conversations} == {2, 4}
    for conversation in conversations:
        tokens, end = conversation.token_ids, 0
        assert tokens[: conversation.turns[0].start] == frame.before
        for question, answer in zip(conversation.turns[::2], conversation.turns[1::2], strict=True):
            assert tokens[question.stop : answer.start] == frame.to_answer
            assert (tokens[: answer.start], tokens[answer.start : answer.stop]) in said
            cuts = range(question.start, question.stop)  # between an opening, if there is one, and the target's words
            assert any((tokens[:cut], tokens[cut : question.stop]) in meant for cut in cuts)
            assert tokens[end : question.start] in (frame.before, frame.to_question, frame.to_question[1:])
            end = answer.stop
        assert end == len(tokens)
    temperatures = {turn.temperature for c in conversations for turn in c.turns if turn.is_answer}
    assert temperatures == {0.0, 0.3, 0.7, 1.0}


def test_no_question_is_kept_twice(making: Making) -> None:
    conversations = making.run(ToyLanguage(num_questions=7), max_tokens=300)
    questions = [conversation.question for conversation in conversations]
    assert len(set(questions)) == len(questions)


@pytest.mark.parametrize("num_questions", [1000, 7])
def test_neither_kills_nor_company_change_the_conversations(
    num_questions: int, making: Making, tmp_path: Path, frame: ChatFrame, tokenizer: Tokenizer
) -> None:
    at_once = making.run(ToyLanguage(num_questions=num_questions), max_tokens=300)
    killed = Making(tmp_path / "killed.jsonl", frame, tokenizer)
    for number in range(4):
        with pytest.raises(KeyboardInterrupt):
            killed.run(ToyLanguage(3 + number, num_questions, left=11), max_tokens=300)
        content = killed.path.read_bytes()
        killed.path.write_bytes(content + content[: len(content) // 3].rpartition(b"\n")[0][-50:])  # a line cut off
    assert killed.run(ToyLanguage(9, num_questions), max_tokens=300) == at_once
    assert killed.run(ToyLanguage(9, num_questions), max_tokens=300) == at_once, "a finished corpus is finished"


def test_time_ends_it_over_all_runs_and_what_has_come_is_kept(making: Making) -> None:
    class Slow(ToyLanguage):
        def step(self) -> object:
            time.sleep(0.01)
            return super().step()

    first = making.run(Slow(), max_seconds=0.3)
    assert len(first) >= 2
    unused = ToyLanguage()
    assert making.run(unused, max_seconds=0.3) == first
    assert unused.prompts == []


def test_a_language_of_one_question_is_given_up(making: Making) -> None:
    with pytest.raises(CorpusFailed, match="cannot be distilled"):
        making.run(ToyLanguage(num_questions=1), max_tokens=10_000)


def test_another_seed_makes_other_conversations(making: Making, tokenizer: Tokenizer, frame: ChatFrame) -> None:
    first = ConversationSampler(frame, tokenizer, SETTINGS).dialogue(0).send(None)
    second = ConversationSampler(frame, tokenizer, DistillSettings(seed=6)).dialogue(0).send(None)
    assert first != second
