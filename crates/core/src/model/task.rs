//! What a model is used for, which decides its head.

use super::config::Config;
use super::error::ModelError;
use super::families::{facts, usual_head, with_head};

/// The head on top of a model, as transformers' auto classes name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// `AutoModelForCausalLM`.
    CausalLm,
    /// `AutoModelForMaskedLM`.
    MaskedLm,
    /// `AutoModel`: no head.
    Base,
    /// `AutoModelForSeq2SeqLM`.
    Seq2SeqLm,
    /// `AutoModelForSpeechSeq2Seq`.
    SpeechSeq2Seq,
    /// `AutoModelForImageTextToText`.
    ImageTextToText,
    /// `AutoModelForMultimodalLM`.
    MultimodalLm,
    /// `AutoModelForImageClassification`.
    ImageClassification,
    /// `AutoModelForAudioClassification`.
    AudioClassification,
    /// `AutoModelForVideoClassification`.
    VideoClassification,
    /// `AutoModelForSequenceClassification`.
    SequenceClassification,
    /// `AutoModelForTokenClassification`.
    TokenClassification,
    /// `AutoModelForQuestionAnswering`.
    QuestionAnswering,
    /// `AutoModelForMultipleChoice`: a sample is a question with [`CHOICES`] answers.
    MultipleChoice,
    /// `AutoModelForCTC`.
    Ctc,
    /// `AutoModelForPreTraining`.
    PreTraining,
}

/// Answers to a question of which one is chosen, each a sequence of its own: as many as SWAG has.
pub const CHOICES: u64 = 4;

/// Auto classes by name.
const AUTO_CLASSES: &[(&str, Task)] = &[
    ("AutoModelForCausalLM", Task::CausalLm),
    ("AutoModelForMaskedLM", Task::MaskedLm),
    ("AutoModel", Task::Base),
    ("AutoModelForSeq2SeqLM", Task::Seq2SeqLm),
    ("AutoModelForSpeechSeq2Seq", Task::SpeechSeq2Seq),
    ("AutoModelForImageTextToText", Task::ImageTextToText),
    ("AutoModelForMultimodalLM", Task::MultimodalLm),
    ("AutoModelForImageClassification", Task::ImageClassification),
    ("AutoModelForAudioClassification", Task::AudioClassification),
    ("AutoModelForVideoClassification", Task::VideoClassification),
    ("AutoModelForSequenceClassification", Task::SequenceClassification),
    ("AutoModelForTokenClassification", Task::TokenClassification),
    ("AutoModelForQuestionAnswering", Task::QuestionAnswering),
    ("AutoModelForMultipleChoice", Task::MultipleChoice),
    ("AutoModelForCTC", Task::Ctc),
    ("AutoModelForPreTraining", Task::PreTraining),
];

/// Endings of class names in `architectures`, longest first where one ends another.
const ARCHITECTURE_ENDINGS: &[(&str, Task)] = &[
    ("ForCausalLM", Task::CausalLm),
    ("LMHeadModel", Task::CausalLm),
    ("ForMaskedLM", Task::MaskedLm),
    ("ForConditionalGeneration", Task::ImageTextToText),
    ("ForSpeechSeq2Seq", Task::SpeechSeq2Seq),
    ("ForSequenceClassification", Task::SequenceClassification),
    ("ForTokenClassification", Task::TokenClassification),
    ("ForQuestionAnswering", Task::QuestionAnswering),
    ("ForImageClassification", Task::ImageClassification),
    ("ForAudioClassification", Task::AudioClassification),
    ("ForVideoClassification", Task::VideoClassification),
    ("ForMultipleChoice", Task::MultipleChoice),
    ("ForCTC", Task::Ctc),
    ("ForPreTraining", Task::PreTraining),
    ("MTModel", Task::Seq2SeqLm),
    ("Model", Task::Base),
];

/// The auto class of a class that loads a model, where its name alone decides the head: `BertForTokenClassification` has that of
/// `AutoModelForTokenClassification`.
pub fn auto_class_of(class: &str) -> Option<&str> {
    match class {
        // Two names of one mapping (transformers 4 and 5).
        "AutoModelForVision2Seq" => return Some("AutoModelForImageTextToText"),
        _ if class.starts_with("AutoModelFor") && !class.ends_with("WithValueHead") => return Some(class),
        _ => {}
    }
    let head = |ending: &str| !["ForConditionalGeneration", "MTModel", "Model"].contains(&ending);
    let found = ARCHITECTURE_ENDINGS.iter().find(|(ending, _)| head(ending) && class.ends_with(ending));
    found.map(|(_, task)| task.class())
}

impl Task {
    /// Whether transformers' `generate` runs a model with this head.
    pub fn generates(self) -> bool {
        !matches!(self, Self::MaskedLm | Self::Base | Self::Ctc) && !self.classifies()
    }

    /// Whether its head gives classes: of samples, tokens or positions.
    pub fn classifies(self) -> bool {
        matches!(
            self,
            Self::ImageClassification
                | Self::AudioClassification
                | Self::VideoClassification
                | Self::SequenceClassification
                | Self::TokenClassification
                | Self::QuestionAnswering
                | Self::MultipleChoice
        )
    }

    /// Whether a decoder runs beside an encoder.
    pub fn encodes(self) -> bool {
        matches!(self, Self::Seq2SeqLm | Self::SpeechSeq2Seq)
    }

    /// The auto class.
    pub fn class(self) -> &'static str {
        AUTO_CLASSES.iter().find(|(_, task)| *task == self).map_or("AutoModel", |(class, _)| class)
    }

    /// The one of an auto class.
    pub fn by_class(name: &str) -> Option<Self> {
        AUTO_CLASSES.iter().find(|(class, _)| *class == name).map(|(_, task)| *task)
    }

    /// From an auto class, else from the config's `architectures`, else what its type usually is.
    pub fn of(config: &Config<'_>, auto_class: Option<&str>) -> Result<Self, ModelError> {
        if let Some(name) = auto_class {
            return Self::by_class(name).ok_or_else(|| ModelError::BadValue {
                path: "auto_class".to_owned(),
                value: name.to_owned(),
                expected: format!("one of {}", AUTO_CLASSES.iter().map(|(c, _)| *c).collect::<Vec<_>>().join(", ")),
            });
        }
        if config.model_type() == super::learned::program::MODEL_TYPE {
            // One pass with a loss of its own; nothing is generated.
            return Ok(Self::SequenceClassification);
        }
        if config.has("_class_name") {
            // One of diffusers: it has no heads.
            return Ok(Self::Base);
        }
        let architectures = config.strings("architectures")?.unwrap_or_default();
        let class = architectures.first().copied().unwrap_or_default();
        let by_ending = ARCHITECTURE_ENDINGS.iter().find(|(ending, _)| class.ends_with(ending)).map(|(_, task)| *task);
        Ok(match by_ending {
            Some(Self::ImageTextToText) => facts(config.model_type()).conditional_generation,
            // Classes over sound are named like those over text, and loaded by another auto class.
            Some(Self::SequenceClassification)
                if with_head(config.model_type(), Self::SequenceClassification).is_none()
                    && with_head(config.model_type(), Self::AudioClassification).is_some() =>
            {
                Self::AudioClassification
            }
            Some(task) => task,
            None => usual_head(config.model_type()),
        })
    }
}
