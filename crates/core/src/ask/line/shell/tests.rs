use super::*;

#[test]
fn a_script_becomes_lines() {
    let text = "#!/bin/bash\nN=${1:-4}\nMODEL=\"org/my model\"\nexport A=1 # why\n\ntorchrun --nproc_per_node $N \\\n  train.py --model \"$MODEL\" --x '{\"a\": 1}' && echo done\n";
    let lines = lines(text);
    assert_eq!(lines[0], ["export", "A=1"]);
    assert_eq!(
        lines[1],
        ["torchrun", "--nproc_per_node", "4", "train.py", "--model", "org/my model", "--x", "{\"a\": 1}"]
    );
    assert_eq!(lines[2], ["echo", "done"]);
    let arrays = super::lines("ARGS=(\n  --a 1 # one\n  --b\n)\nARGS+=(--c 2)\ntorchrun x.py \"${ARGS[@]}\"\n");
    assert_eq!(arrays, [["torchrun", "x.py", "--a", "1", "--b", "--c", "2"]]);
    let here = super::lines("N=4\nD=$(cd \"$(dirname \"$0\")\" && pwd)\nW=$(($N*2 + 1))\nrun $D/x.py $W $(date)\n");
    assert_eq!(here, [["run", "./x.py", "9", "$"]]);
}

#[test]
fn values_are_put_in() {
    let first = |text: &str| lines(text).remove(0).join(" ");
    assert_eq!(first("B=4\nx $(expr 64 / $B) `expr 3 \\* 2` $(echo \"$B * 2\" | bc)\n"), "x 16 6 8");
    assert_eq!(first("B=4\nx $(( (B + 3) / 2 )) $((B % 3)) $((1/0))\n"), "x 3 1 $");
    assert_eq!(first("declare -a E=(\"--a\" 1)\nlocal C=2\nx ${E[@]} $C ${#E[@]} ${E[1]}\n"), "x --a 1 2 2 1");
    assert_eq!(first("A=1\nx ${A:-2} ${B:-2} ${C:=${A}b} ${A:+set} ${B:+unset} ${D-5}\n"), "x 1 2 1b set 5");
    assert_eq!(first("A='--a 1'\nA+=' --b 2'\nx $A\n"), "x --a 1 --b 2");
    assert_eq!(first("P=a/b/c\nx ${P##*/} $(basename $P) ${UNSET} $1\n"), "x c c $UNSET $1");
    assert_eq!(first("CUDA_VISIBLE_DEVICES=0,1,2\nx $(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l)\n"), "x 3");
}

#[test]
fn comments_end_with_their_lines() {
    let text = "# first \\\ntorchrun a.py \\\n  --b 1 \\  \n  --c 2 \\\n  # --d 3 \\\n  --e 4\n";
    assert_eq!(lines(text), [vec!["torchrun", "a.py", "--b", "1", "--c", "2"], vec!["--e", "4"]]);
}

#[test]
fn functions_and_loops_are_followed() {
    let text = "run() {\n  torchrun --nproc_per_node $1 a.py \"${@}\"\n}\nrun 2 --x 1\n";
    assert_eq!(lines(text), [["torchrun", "--nproc_per_node", "2", "a.py", "2", "--x", "1"]]);
    assert_eq!(lines("run() { torchrun a.py \"$@\"; }\nrun --x 1\n"), [["torchrun", "a.py", "--x", "1"]]);
    assert_eq!(lines("function main {\n  torchrun a.py\n}\n"), [["torchrun", "a.py"]]);
    assert_eq!(lines("f() {\n f\n}\nf\n").len(), 1);
    let found = script("for bs in 4 8; do\n  torchrun a.py --bs $bs\ndone\n", &[]);
    assert_eq!(found.lines[0], ["torchrun", "a.py", "--bs", "4"]);
    assert!(found.notes[0].contains("bs goes through several values: 4 is taken"));
}

#[test]
fn files_that_a_script_writes_are_kept() {
    let text = "B=2\ncat > /tmp/a.yaml <<EOF\nbatch: $B\nname: \\$x\nEOF\ncat <<'E' > b.json\n{\"a\": \"$B\"}\nE\nsbatch <<EOT\n#SBATCH --nodes=2 --gres=gpu:a100:4\nsrun a.py --n $SLURM_NNODES\nEOT\n";
    let found = script(text, &[]);
    assert_eq!(found.files["/tmp/a.yaml"], "batch: 2\nname: $x");
    assert_eq!(found.files["b.json"], "{\"a\": \"$B\"}");
    assert_eq!(found.lines.last().unwrap(), &["srun", "a.py", "--n", "2"]);
    assert!(found.lines[0].contains(&"SLURM_GPUS_ON_NODE=4".to_owned()));
}

#[test]
fn what_hangs_on_a_condition_runs_where_it_is_met() {
    for (text, wanted) in [
        ("[ -n \"$DEBUG\" ] && A=1\nx $A\n", "x $A"),
        ("DEBUG=1\n[ -n \"$DEBUG\" ] && A=1\nx $A\n", "x 1"),
        ("test \"$1\" == gc && A=1\nx $A\n", "x $A"),
        ("[ -z \"$1\" ] && A=1 || A=2\nx $A\n", "x 1"),
        ("N=4\n[[ $N -gt 8 ]] && A=1 || A=2\nx $A\n", "x 2"),
        ("[ -f a.txt ] && A=1\nx $A\n", "x 1"),
        ("cd x && A=1\nx $A\n", "x 1"),
    ] {
        assert_eq!(lines(text).last().unwrap().join(" "), wanted, "{text}");
    }
    assert!(script("[ -n \"$DEBUG\" ] && A=1\n", &[]).notes[0].contains("$DEBUG"));
}

#[test]
fn branches_run_where_the_text_tells() {
    for (text, wanted) in [
        ("A=1\nif [ \"$A\" = 1 ]; then\n  B=2\nelse\n  B=3\nfi\nx $B\n", "x 2"),
        ("A=5\nif [ $A -gt 8 ]; then B=1; elif [[ $A -gt 4 ]] && true; then B=2; else B=3; fi\nx $B\n", "x 2"),
        (
            "B=4\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    --b)\n      B=\"$2\"\n      shift 2\n      ;;\n  esac\ndone\nx $B\n",
            "x 4",
        ),
        ("M=qwen-7b\ncase \"$M\" in\n  *llama*) B=1 ;;\n  qwen*|other) B=2 ;;\n  *) B=3 ;;\nesac\nx $B\n", "x 2"),
        // A value that only a run would tell does not take the place of one that is known.
        ("G=1\nif nvidia-smi; then\n  G=$(nvidia-smi -L | wc -l)\nfi\nx $G\n", "x 1"),
        ("if command -v rocm-smi || [[ -d /opt/rocm ]]; then A=amd; else A=cuda; fi\nx $A\n", "x cuda"),
        // Arguments that are not given are nobody's choice.
        ("if [ \"$1\" = a ]; then B=1; fi\nx $B\n", "x 1"),
        ("A=()\nx --b \"${A[@]}\" 2\n", "x --b 2"),
        ("D=0,1,3\nx $(echo $D | awk -F',' '{print NF}')\n", "x 3"),
    ] {
        assert_eq!(lines(text).last().unwrap().join(" "), wanted, "{text}");
    }
    let given = ["8".to_owned(), "b".to_owned()];
    assert_eq!(script("N=$1\nif [ $# -eq 2 ]; then M=$2; fi\nx $N $M\n", &given).lines, [["x", "8", "b"]]);
}
