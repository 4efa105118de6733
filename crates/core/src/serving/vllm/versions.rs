//! The rules of a version by its name.

use super::rules::{OLDEST, RULES, Rules, V0_6_5, V0_9_1};

/// The newest vLLM that something is known of: the worker of 0.33.0, rehearsed three times without graphs, leaves pools within
/// 0.45 % of what the rules of 0.32 say.
const NEWEST: [u32; 2] = [0, 33];

/// The version where none is named: the newest that was rehearsed at length (truth/engines/vllm-1.jsonl).
pub const DEFAULT_VERSION: &str = "0.32.0";

/// Whether a version can be read and was there; else what one looks like, and the newest.
pub fn readable(version: &str) -> Result<(), (String, String)> {
    let newest = format!("{}.{}.0", NEWEST[0], NEWEST[1]);
    let mut parts = version.trim_start_matches('v').split(['.', '-', '+', '/', ' ']).map(str::parse::<u32>);
    match (version, parts.next(), parts.next()) {
        ("main", ..) => Ok(()),
        (_, Some(Ok(major)), Some(Ok(minor))) if [major, minor] <= NEWEST => Ok(()),
        (_, Some(Ok(_)), Some(Ok(_))) => Err((format!("a version whose rules are known (up to {newest})"), newest)),
        _ => Err((format!("a version such as {newest}"), newest)),
    }
}

/// The rules of a version such as `0.11.0`; the newest where it cannot be read. `0.8.5 V0` and `0.7.3 V1` name the
/// engine that was not the default of its time.
pub fn rules(version: &str) -> Rules {
    let mut numbers = version
        .split(['.', '-', '+', '/'])
        .map(|part| part.chars().take_while(char::is_ascii_digit).collect::<String>())
        .map_while(|digits| digits.parse::<u32>().ok());
    let parsed = numbers.next().map(|major| [major, numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)]);
    let wanted = parsed.unwrap_or([u32::MAX; 3]);
    let found = *RULES.iter().find(|rules| wanted >= rules.since).unwrap_or(&OLDEST);
    let named = |engine: &str| version.split([' ', '/']).any(|word| word.eq_ignore_ascii_case(engine));
    match (named("v0"), named("v1")) {
        // What is V0's is as it had always been.
        (true, _) => {
            let context_counted = wanted < V0_6_5.since;
            Rules { v1: false, context_counted, sequences: [256, 256], groups: false, ..found }
        }
        // `profile_run` of v1/worker/gpu_model_runner.py in v0.7.3, `_dummy_sampler_run` in v0.8.0.
        (_, true) => {
            let context_counted = wanted < V0_9_1.since;
            Rules { v1: true, context_counted, samples: found.v1, ..found }
        }
        _ => found,
    }
}

#[cfg(test)]
mod tests {
    use super::super::rules::RULES;
    use super::rules;

    #[test]
    fn versions_are_from_new_to_old() {
        assert!(RULES.windows(2).all(|pair| pair[0].since > pair[1].since));
    }

    #[test]
    fn the_rules_of_a_version_are_found() {
        assert_eq!(rules("0.20.1rc1.dev16+g7a1eb8ac2").since, [0, 20, 1]);
        assert_eq!(rules("0.8.5.post1").since, [0, 8, 4]);
        assert_eq!(rules("0.26/0.27").since, [0, 26, 0]);
        assert_eq!(rules("main").since, [0, 32, 0]);
        assert_eq!(rules("0.30.0").since, [0, 29, 0]);
        assert!(rules("0.8.5").v1 && !rules("0.8.5 V0").v1);
        assert!(rules("0.7.3 V1").v1 && !rules("0.7.3").v1);
    }
}
