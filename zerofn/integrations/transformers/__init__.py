"""Hugging Face's `Trainer` with ZeroFn's step: change two import lines of a script.

from zerofn.integrations.transformers import Trainer, TrainingArguments
"""

from .arguments import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
from .arguments import TrainingArguments as TrainingArguments
from .seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
from .trainer import Trainer as Trainer
