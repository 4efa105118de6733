//! Any text as a user's own tables: a machine's profile, cards, data types; and as words that have a grammar.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::calibrate::profile::Profile;
use vramcast_core::dtype::formats_from_toml;
use vramcast_core::plan::{AllocatorOptions, Framework, Gpus, Version};

fuzz_target!(|text: &str| {
    if let Ok(profile) = Profile::parse(text) {
        assert!(Profile::parse(&profile.text()).is_ok_and(|again| again == profile));
    }
    if let Ok(cards) = Gpus::embedded().with(text) {
        assert!(cards.all().all(|card| card.memory > 0 && card.capability() < 100_000));
    }
    let _ = formats_from_toml(text);
    if let Ok((options, _)) = AllocatorOptions::parse(text) {
        assert!(AllocatorOptions::parse(&options.written()).is_ok());
    }
    let _ = (Version::parse(text), Framework::find(text).is_ok());
});
