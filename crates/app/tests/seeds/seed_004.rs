//! "LLMGPUMemEstimator": every figure in its README, to the last digit, from the command line.

use super::json;

const GIB: f64 = (1u64 << 30) as f64;
const SEVEN: &str = "--params 7e9 --layers 32 --hidden 4096 --heads 32 --vocab 32000 --method korthikanti";
const HALF: &str = "--params 5e8 --layers 24 --hidden 1024 --heads 16 --vocab 32000 --method korthikanti";

fn figures(line: &str) -> [f64; 4] {
    let document = json(line);
    let term = |index: usize| document["terms"][index]["bytes"].as_f64().unwrap() / GIB;
    [document["total"].as_f64().unwrap() / GIB, term(0), term(1), term(2)]
}

/// `Estimator()`: the default 7b model.
#[test]
fn seven_billion() {
    assert_eq!(
        figures(&format!("train {SEVEN} --seq-len 512")),
        [120.7826795578003, 104.3081283569336, 3.43603515625, 13.0385160446167]
    );
    assert_eq!(
        figures(&format!("train {SEVEN} --seq-len 512 --zero 3 --dp 4")),
        [42.5515832901001, 26.0770320892334, 3.43603515625, 13.0385160446167]
    );
    assert_eq!(
        figures(&format!("train {SEVEN} --seq-len 2048 --zero 3 --dp 4")),
        [67.8596887588501, 26.0770320892334, 28.744140625, 13.0385160446167]
    );
}

/// `estimate_gpu_memory_inference(precision=2)` and `(precision=4)`.
#[test]
fn inference() {
    let weights = |rest: &str| json(&format!("infer {rest}"))["total"].as_f64().unwrap() / GIB;
    assert_eq!(weights(&format!("{SEVEN} --dtype fp16")), 13.0385160446167);
    assert_eq!(weights(&format!("{SEVEN} --dtype fp32")), 26.0770320892334);
    assert_eq!(weights(&format!("{HALF} --dtype fp16")), 0.9313225746154785);
}

/// `Estimator(model_params=5e8, a=16, h=1024, L=24)`.
#[test]
fn a_model_of_ones_own() {
    assert_eq!(
        figures(&format!("train {HALF} --seq-len 512")),
        [9.310125827789307, 7.450580596923828, 0.92822265625, 0.9313225746154785]
    );
    assert_eq!(
        figures(&format!("train {HALF} --seq-len 2048 --zero 3 --dp 4")),
        [12.131858348846436, 1.862645149230957, 9.337890625, 0.9313225746154785]
    );
}
