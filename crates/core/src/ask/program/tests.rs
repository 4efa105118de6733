//! Programs as fresh eyes write them.

use super::*;

const MODEL: &str = "m = AutoModelForCausalLM.from_pretrained('gpt2')\n";
const ARGS: &str = "args = TrainingArguments('o', per_device_train_batch_size=1)\n";
const END: &str = "Trainer(model=m, args=args)\n";

fn answer(text: &str) -> Result<Content, String> {
    read(text, &Call::new(), None, &Beside::default())
        .map_err(|faults| faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

fn at(text: &str, place: &str) -> Value {
    let content = answer(text).unwrap_or_else(|fault| panic!("{text}: {fault}"));
    tree::get(&content.tree, place).cloned().unwrap_or_default()
}

#[test]
fn what_changes_values_is_followed() {
    let size = "batch.batch_size";
    for (between, wanted) in [
        (
            "kw = dict(per_device_train_batch_size=1)\nkw.update(per_device_train_batch_size=16)\nargs = TrainingArguments(**kw)\n",
            16,
        ),
        ("kw = {}\nkw['per_device_train_batch_size'] = 8\nargs = TrainingArguments('o', **kw)\n", 8),
        ("args = TrainingArguments('o')\nsetattr(args, 'per_device_train_batch_size', 16)\n", 16),
        ("a = TrainingArguments('o')\nargs = replace(a, per_device_train_batch_size=16)\n", 16),
        ("args = TrainingArguments('o')\nargs.set_training(learning_rate=1e-5, batch_size=32)\n", 32),
        (
            "b = 4\ndef f():\n    global b\n    b = 64\nf()\nargs = TrainingArguments('o', per_device_train_batch_size=b)\n",
            64,
        ),
        ("l = [1, 2]\nl.append(7)\nargs = TrainingArguments('o', per_device_train_batch_size=l[-1])\n", 7),
        ("l = [1, 2]\nl[0] = 9\nargs = TrainingArguments('o', per_device_train_batch_size=l[0])\n", 9),
        ("b = 4\nb *= 2\nargs = TrainingArguments('o', per_device_train_batch_size=b)\n", 8),
        ("def f(a):\n    a.per_device_train_batch_size = 3\nargs = TrainingArguments('o')\nf(args)\n", 3),
        ("args = TrainingArguments('o', per_device_train_batch_size=7 // -2 + 8)\n", 4),
    ] {
        assert_eq!(at(&format!("{MODEL}{between}{END}"), size), json!(wanted), "{between}");
    }
}

#[test]
fn what_only_a_run_tells_is_refused_by_name() {
    let sized = "args = TrainingArguments('o', per_device_train_batch_size=";
    for (between, named) in [
        (format!("{ARGS}if big():\n    args.per_device_train_batch_size = 16\n"), "args.per_device_train_batch_size"),
        (format!("{ARGS}if big():\n    setattr(args, 'per_device_train_batch_size', 16)\n"), "setattr"),
        (format!("{ARGS}if big():\n    args.set_training(batch_size=3)\n"), "set_training"),
        (format!("{ARGS}setattr(args, key(), 16)\n"), "setattr"),
        (format!("if big():\n    {ARGS}else:\n    args = TrainingArguments('o')\n"), "args: which one of"),
        (format!("if f():\n    b = 1\nelif True:\n    b = 4\n{sized}b)\n"), ": b is not known"),
        (format!("l = [1, 2]\nl.sort()\n{sized}l[0])\n"), "l[0]"),
        (format!("a = [1, 2]\nl = a\na.append(3)\n{sized}l[0])\n"), "l[0]"),
        (format!("def f():\n    if g():\n        return 2\n    return 4\n{sized}f())\n"), "f()"),
        (format!("{ARGS}for p in m.parameters():\n    p.requires_grad = False\n"), "requires_grad of m.parameters()"),
        (
            format!("{ARGS}for n, p in m.named_parameters():\n    if n in x:\n        p.requires_grad = False\n"),
            "requires_grad",
        ),
        ("if x():\n    m = AutoModelForCausalLM.from_pretrained('gpt2-xl')\n".to_owned() + ARGS, "model: which one of"),
    ] {
        let fault = answer(&format!("{MODEL}{between}{END}")).err().unwrap_or_else(|| panic!("{between} is answered"));
        assert!(fault.contains(named), "{between}: {fault}");
    }
    let gptq = "m = AutoModelForCausalLM.from_pretrained('a/b', quantization_config=GPTQConfig(bits=4))\n";
    assert!(answer(&format!("{gptq}{ARGS}{END}")).unwrap_err().contains("GPTQConfig"));
    let sgd = format!("{MODEL}{ARGS}Trainer(m, args, optimizers=(MyOwn(m.parameters()), None))\n");
    assert!(answer(&sgd).unwrap_err().contains("MyOwn"));
}

#[test]
fn what_is_done_to_the_model_counts() {
    for (between, place, wanted) in [
        ("m.gradient_checkpointing_enable()\n", "checkpointing", json!("full")),
        ("", "checkpointing", Value::Null),
        ("m.half()\n", "weights", json!("fp16")),
        ("m = m.to('cuda').to(torch.bfloat16)\n", "weights", json!("bf16")),
        ("x = tokenizer('a').to(torch.float16)\n", "weights", Value::Null),
        ("if torch.cuda.is_available():\n    m.half()\n", "weights", json!("fp16")),
        (
            "d = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')\nif d.type == 'cuda':\n    m.half()\n",
            "weights",
            json!("fp16"),
        ),
        (
            "for p in m.transformer.wte.parameters():\n    p.requires_grad = False\n",
            "frozen",
            json!(["transformer.wte"]),
        ),
        ("m.transformer.wte.requires_grad_(False)\n", "frozen", json!(["transformer.wte"])),
        ("c = LoraConfig(r=8, target_modules=['c_attn'])\nm = get_peft_model(m, c)\n", "adapter.rank", json!(8)),
        ("c = LoraConfig(r=8, target_modules=['c_attn'])\n", "adapter", Value::Null),
    ] {
        assert_eq!(at(&format!("{MODEL}{between}{ARGS}{END}"), place), wanted, "{between}");
    }
    let sgd =
        format!("{MODEL}{ARGS}Trainer(m, args, optimizers=(torch.optim.SGD(m.parameters(), momentum=0.9), None))\n");
    assert_eq!(at(&sgd, "optimizer.kind"), json!("sgd-momentum"));
    let unused = answer(&format!("c = LoraConfig(r=8)\n{MODEL}{ARGS}{END}")).unwrap();
    assert!(unused.notes.iter().any(|note| note.contains("handed to nobody")), "{:?}", unused.notes);
}

#[test]
fn the_model_that_is_trained_is_meant_and_its_class_decides_its_head() {
    let two = "n = AutoModelForSequenceClassification.from_pretrained('bert-base-uncased')\n";
    let read = answer(&format!("{MODEL}{two}{ARGS}Trainer(model=n, args=args)\n")).unwrap();
    let class = Some("AutoModelForSequenceClassification");
    assert_eq!((read.model.as_deref(), read.auto_class.as_deref()), (Some("bert-base-uncased"), class));
    let other = answer(&format!("{two}{MODEL}{ARGS}Trainer(m, args)\n")).unwrap();
    assert_eq!((other.model.as_deref(), other.auto_class.as_deref()), (Some("gpt2"), Some("AutoModelForCausalLM")));
    let own = "m = BertForTokenClassification.from_pretrained('bert-base-uncased')\n";
    let own = answer(&format!("{own}{ARGS}{END}")).unwrap();
    assert_eq!(own.auto_class.as_deref(), Some("AutoModelForTokenClassification"));
}

#[test]
fn values_that_grow_have_an_end() {
    let doubled = |first: &str, line: &str| format!("{first}{}", line.repeat(40));
    for grown in [
        doubled("x = 'aaaaaaaa'\n", "x = x + x\n"),
        doubled("x = f(1)\n", "x = f(x, x)\n"),
        doubled("x = [1]\n", "x = [x, x, x]\n"),
        doubled("x = {}\n", "x['a'] = x\nx['b'] = x\n"),
        doubled("x = [1]\n", "x.extend(x)\n"),
        "x = f(0)\n".to_owned() + &"x = f(x)\n".repeat(3000),
    ] {
        let read = python::read(&format!("{grown}{MODEL}{ARGS}{END}"), &Call::new());
        assert!(read.over || read.calls.iter().any(|call| name(call) == "Trainer"));
        let known = format!("{grown}args = TrainingArguments('o', per_device_train_batch_size=x)\n{MODEL}{END}");
        assert!(answer(&known).is_err());
    }
    let long = "x = 1\n".repeat(30_000);
    assert!(answer(&format!("{long}{MODEL}{ARGS}{END}")).unwrap_err().contains("larger than what is followed"));
    let nested: String = (0..300).map(|depth| format!("{}if x:\n", " ".repeat(depth))).collect();
    assert!(answer(&format!("{nested}{}y = 1\n{MODEL}{ARGS}{END}", " ".repeat(300))).is_err());
}

#[test]
fn other_models_and_engines_beside_the_trained_one() {
    let dpo =
        "r = AutoModelForCausalLM.from_pretrained('gpt2-xl')\nDPOTrainer(model=m, ref_model=r, args=DPOConfig('o'))\n";
    let read = answer(&format!("{MODEL}{dpo}")).unwrap();
    assert!(read.notes.iter().any(|note| note.contains("ref_model: gpt2-xl")), "{:?}", read.notes);
    let load = "m, t = FastLanguageModel.from_pretrained('gpt2', fast_inference=True, gpu_memory_utilization=0.6";
    let grpo = "args = GRPOConfig('o', num_generations=4)\nGRPOTrainer(model=m, args=args)\n";
    assert_eq!(
        at(&format!("{load})\n{grpo}"), "objective.vllm"),
        json!({"mode": "colocate", "gpu_memory_utilization": 0.6})
    );
    let both = answer(&format!("{load}, load_in_4bit=True, load_in_8bit=True)\n{grpo}")).unwrap_err();
    assert!(both.contains("load_in_4bit and load_in_8bit"), "{both}");
    let dtype =
        "m = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype=torch.bfloat16 if f() else torch.float32)\n";
    assert!(answer(&format!("{dtype}{ARGS}{END}")).unwrap_err().contains("dtype"));
    let card = dtype.replace("f()", "torch.cuda.is_available()");
    assert_eq!(at(&format!("{card}{ARGS}{END}"), "weights"), json!("bf16"));
}

#[test]
fn parts_of_a_cached_loss_are_read() {
    let text = "m = SentenceTransformer('a/b')\nloss = CachedMultipleNegativesRankingLoss(m, mini_batch_size=8)\nargs = \
                SentenceTransformerTrainingArguments('o', per_device_train_batch_size=64)\n\
                SentenceTransformerTrainer(model=m, args=args, loss=loss)\n";
    assert_eq!(at(text, "objective.mini_batch_size"), json!(8));
}

#[test]
fn arguments_that_only_a_run_tells_can_be_left_out() {
    let text =
        format!("{MODEL}args = TrainingArguments('o', per_device_train_batch_size=4, **config['training'])\n{END}");
    assert!(answer(&text).is_err_and(|error| error.contains("--without **")));
    let without = ["**".to_owned()];
    let content = read(&text, &Call::new(), None, &Beside { without: &without, ..Beside::default() }).unwrap();
    assert_eq!(tree::get(&content.tree, "batch.batch_size"), Some(&json!(4)));
}

#[test]
fn calls_that_decide_memory_are_read_or_said() {
    let qwen = "m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-0.5B'";
    let compiled = format!("{MODEL}m = torch.compile(m)\n{ARGS}{END}");
    assert_eq!(at(&compiled, "torch_compile"), json!("model"));
    // Of something else, or kept by nobody.
    for other in ["x = re.compile('a')\n", "n = torch.compile(m)\n"] {
        assert_eq!(at(&format!("{MODEL}{other}{ARGS}{END}"), "torch_compile"), Value::Null, "{other}");
    }
    let liger = "m = AutoLigerKernelForCausalLM.from_pretrained('Qwen/Qwen2.5-0.5B')\n";
    assert_eq!(at(&format!("{liger}{ARGS}{END}"), "kernels"), json!("liger"));
    assert_eq!(at(&format!("apply_liger_kernel_to_qwen2()\n{qwen})\n{ARGS}{END}"), "kernels"), json!("liger"));
    let config = |text: String| answer(&text).unwrap_or_else(|fault| panic!("{text}: {fault}")).config.unwrap();
    assert_eq!(config(format!("{qwen}, num_hidden_layers=4)\n{ARGS}{END}"))["num_hidden_layers"], 4);
    let changed = "c = AutoConfig.from_pretrained('Qwen/Qwen2.5-0.5B')\nc.num_hidden_layers = 3\n";
    assert_eq!(config(format!("{changed}{qwen}, config=c)\n{ARGS}{END}"))["num_hidden_layers"], 3);
    let resized = format!("{qwen})\nm.resize_token_embeddings(151700, pad_to_multiple_of=64)\n{ARGS}{END}");
    assert_eq!(config(resized)["vocab_size"], 151_744);
    let open = answer(&format!("{qwen})\nm.resize_token_embeddings(len(tokenizer))\n{ARGS}{END}")).unwrap();
    assert!(open.config.is_none() && open.notes.iter().any(|note| note.contains("resize_token_embeddings")));
    let unknown = "m = AutoModelForCausalLM.from_pretrained('a/b', num_hidden_layers=4)\n";
    assert!(answer(&format!("{unknown}{ARGS}{END}")).unwrap_err().contains("num_hidden_layers=4"));
    let eight = format!("{MODEL}{ARGS}Trainer(m, args, optimizer_cls_and_kwargs=(bnb.optim.AdamW8bit, {{'lr': 1}}))\n");
    assert_eq!(at(&eight, "optimizer.kind"), json!("adamw8bit"));
    let own = "class Mine(Trainer):\n    def create_optimizer(self):\n        pass\n    def compute_loss(self, model, inputs):\n        pass\n";
    let fault = answer(&format!("{own}{MODEL}{ARGS}Mine(model=m, args=args)\n")).unwrap_err();
    assert!(fault.contains("Mine.create_optimizer"), "{fault}");
    let conf = "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':16:8'\n";
    let set = answer(&format!("{conf}{MODEL}{ARGS}{END}")).unwrap();
    assert!(set.named.iter().any(|(name, _)| name == "alloc-conf"));
    assert!(set.notes.iter().any(|note| note.contains("CUBLAS_WORKSPACE_CONFIG")), "{:?}", set.notes);
}

#[test]
fn classes_of_the_file_bring_their_defaults() {
    let classes = "@dataclass\nclass Script:\n    model_name: str = field(default='gpt2', metadata={'help': 'x'})\n    rank: int = 8\n\
                   @dataclass\nclass Own(TrainingArguments):\n    per_device_train_batch_size: int = field(default=3)\n\
                   parser = HfArgumentParser((Script, Own))\nscript, args = parser.parse_args_into_dataclasses()\n\
                   m = AutoModelForCausalLM.from_pretrained(script.model_name)\nm = get_peft_model(m, LoraConfig(r=script.rank))\n";
    let read_with = |given: Value| {
        let given = given.as_object().cloned().unwrap_or_default();
        read(&format!("{classes}{END}"), &given, None, &Beside::default())
            .map_err(|faults| faults[0].to_string())
            .unwrap()
    };
    let usual = read_with(json!({}));
    let get = |content: &Content, place: &str| tree::get(&content.tree, place).cloned().unwrap_or_default();
    assert_eq!(usual.model.as_deref(), Some("gpt2"));
    assert_eq!((get(&usual, "adapter.rank"), get(&usual, "batch.batch_size")), (json!(8), json!(3)));
    let said = read_with(json!({"rank": 64, "gradient_accumulation_steps": 5}));
    assert_eq!((get(&said, "adapter.rank"), get(&said, "gradient_accumulation")), (json!(64), json!(5)));
    let plain = format!(
        "class C:\n    size = 7\n{MODEL}args = TrainingArguments('o', per_device_train_batch_size=C.size)\n{END}"
    );
    assert_eq!(at(&plain, "batch.batch_size"), json!(7));
}

#[test]
fn adapters_leave_their_type_to_the_trainer() {
    let bits = "b = BitsAndBytesConfig(load_in_4bit=True)\nm = AutoModelForCausalLM.from_pretrained('gpt2', quantization_config=b)\n";
    let trl = format!("{bits}args = SFTConfig('o')\nSFTTrainer(model=m, args=args, peft_config=LoraConfig(r=8))\n");
    let content = answer(&trl).unwrap();
    assert_eq!(
        (tree::get(&content.tree, "adapter.rank"), tree::get(&content.tree, "adapter.dtype")),
        (Some(&json!(8)), None)
    );
}

/// vLLM's examples: defaults that a parser is given, and what changes no memory however it is made.
#[test]
fn an_engines_arguments_come_by_a_parser() {
    let text = "def parse():\n    p = FlexibleArgumentParser()\n    p = EngineArgs.add_cli_args(p)\n    p.set_defaults(model='gpt2', enforce_eager=True)\n    \
                return p.parse_args()\nargs = parse()\nllm = LLM(**vars(args), kv_transfer_config=KVTransferConfig(kv_role='kv_both'))\n";
    let found = answer(text).unwrap();
    assert_eq!(found.model.as_deref(), Some("gpt2"));
    assert!(found.named.iter().any(|(key, _)| key == "enforce_eager"), "{:?}", found.named);
    assert!(found.notes.iter().any(|note| note.contains("kv_transfer_config")), "{:?}", found.notes);
}

#[test]
fn loops_around_accelerate_are_read() {
    let text = "MAX = 16\ndef train(config, args):\n    accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=2)\n    b = int(config['b'])\n    \
                if b > MAX and accelerator.distributed_type != X:\n        b = MAX\n    loader = DataLoader(d, shuffle=True, batch_size=b)\n    other = DataLoader(e, batch_size=32)\n    \
                model = AutoModelForSequenceClassification.from_pretrained('bert-base-cased')\n    optimizer = AdamW(params=model.parameters(), lr=1e-5)\n    model.eval()\n\
                parser.add_argument('--mixed_precision', default='bf16')\nargs = parser.parse_args()\ntrain({'b': 12}, args)\n";
    let content = answer(text).unwrap();
    assert_eq!(content.model.as_deref(), Some("bert-base-cased"));
    for (place, wanted) in [
        ("batch.batch_size", json!(12)),
        ("gradient_accumulation", json!(2)),
        ("autocast", json!("bf16")),
        ("optimizer.kind", json!("adamw")),
        ("optimizer.implementation", json!("foreach")),
        ("clip", json!(false)),
    ] {
        assert_eq!(tree::get(&content.tree, place), Some(&wanted), "{place}");
    }
    assert!(content.notes.iter().any(|note| note.contains("evaluation")), "{:?}", content.notes);
    let sized = "a = Accelerator()\n@find_executable_batch_size(starting_batch_size=24)\ndef inner(batch_size):\n    DataLoader(d, shuffle=True, batch_size=batch_size)\n    \
                 m = AutoModelForCausalLM.from_pretrained('gpt2')\n    SGD(m.parameters())\ninner()\n";
    assert_eq!(at(sized, "batch.batch_size"), json!(24));
    let mesh = "a = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=4, tp_size=2))\nDataLoader(d, batch_size=1)\nm = \
                AutoModelForCausalLM.from_pretrained('gpt2')\nSGD(m.parameters())\n";
    assert_eq!(at(mesh, "parallel.mesh"), json!({"dp_shard": 4, "tp": 2}));
}

#[test]
fn losses_of_sentence_transformers_are_tasks() {
    let text = |loss: &str| {
        format!(
            "name = sys.argv[1] if len(sys.argv) > 1 else 'bert-base-uncased'\nmodel = SentenceTransformer(name)\nloss = {loss}\nargs = \
             SentenceTransformerTrainingArguments('o', per_device_train_batch_size=8, eval_strategy='steps')\nSentenceTransformerTrainer(model=model, args=args, loss=loss)\n"
        )
    };
    for (loss, task) in [
        ("MultipleNegativesRankingLoss(model)", "mnrl"),
        ("CosineSimilarityLoss(model)", "mnrl"),
        ("MatryoshkaLoss(model, CoSENTLoss(model), [64])", "mnrl"),
        ("TripletLoss(model)", "triplet"),
    ] {
        let content = answer(&text(loss)).unwrap();
        assert_eq!(tree::get(&content.tree, "objective.kind"), Some(&json!(task)), "{loss}");
        assert_eq!(tree::get(&content.tree, "job.evaluation"), None);
        assert_eq!(content.model.as_deref(), Some("bert-base-uncased"));
    }
    assert_eq!(at(&text("MarginMSELoss(model)"), "objective.texts"), json!(3));
    for (loss, why) in [
        ("AdaptiveLayerLoss(model, CoSENTLoss(model))", "every layer"),
        ("BatchHardTripletLoss(model)", "none that is simulated"),
    ] {
        assert!(answer(&text(loss)).unwrap_err().contains(why), "{loss}");
    }
    // A sparse encoder is no plain fine-tuning of its model.
    let sparse =
        "m = SparseEncoder('bert-base-uncased')\nloss = SpladeLoss(m)\nargs = SparseEncoderTrainingArguments('o')\n";
    assert!(answer(sparse).unwrap_err().contains("none that is simulated"));
    let words = text("CoSENTLoss(model)").replace("SentenceTransformer(name)", "SentenceTransformer(modules=[BoW()])");
    assert!(answer(&words).unwrap_err().contains("put together of modules"));
}

#[test]
fn arguments_of_a_line_that_has_to_give_them_are_named() {
    let text = "p.add_argument('--model', required=True)\np.add_argument('--dtype')\na = p.parse_args()\nllm = LLM(model=a.model, dtype=a.dtype)\n";
    assert!(answer(text).unwrap_err().contains("an argument that its line has to give"));
    let free = "p.set_defaults(model='gpt2')\np.add_argument('--max-tokens')\nargs = vars(p.parse_args())\nmax_tokens = args.pop('max_tokens')\nx = \
                args.pop('unseen')\nLLM(**args)\n";
    assert_eq!(answer(free).unwrap().model.as_deref(), Some("gpt2"));
    let class = "@dataclass\nclass S:\n    model: str = field(metadata={})\n    tp: int = 2\nparser = TrlParser(S)\n(s,) = parser.parse_args_and_config()\n\
                 llm = LLM(model=s.model, tensor_parallel_size=s.tp)\n";
    let fault = answer(class).unwrap_err();
    assert!(fault.contains("--model, an argument that its line has to give") && !fault.contains("s.tp"), "{fault}");
}

#[test]
fn functions_inside_of_functions_see_the_names_around_them() {
    let text = "from accelerate import Accelerator\ndef options():\n    p.add_argument('--length', type=int, default=640)\n    return p.parse_args()\n\
                def show(first, *args):\n    print(*args)\ndef main():\n    args = options()\n    a = Accelerator()\n    show(a, args.length)\n    \
                t = AutoTokenizer.from_pretrained('gpt2')\n    m = AutoModelForCausalLM.from_pretrained('gpt2')\n    def tokenize(x):\n        \
                return t(x['text'], padding='max_length', max_length=args.length, truncation=True)\n    d = data.map(tokenize)\n    \
                loader = DataLoader(d, batch_size=6)\n    o = torch.optim.AdamW(m.parameters())\n    m, o, loader = a.prepare(m, o, loader)\n\
                if __name__ == '__main__':\n    main()\n";
    assert_eq!((at(text, "batch.seq_len"), at(text, "batch.batch_size")), (json!(640), json!(6)));
}

#[test]
fn recipes_on_those_of_other_files_are_refused_by_name() {
    let body = "    cfg.model.tensor_model_parallel_size = 2\n    cfg.train.micro_batch_size = 1\n    cfg.ddp.overlap_grad_reduce = True\n    return cfg\n";
    let other =
        format!("from x import llama3_8b_pretrain_config\ndef perf():\n    cfg = llama3_8b_pretrain_config()\n{body}");
    assert!(answer(&other).unwrap_err().contains("llama3_8b_pretrain_config of another file"));
    let own =
        format!("def own_config():\n    cfg = _pretrain_common()\n{body}def perf():\n    cfg = own_config()\n{body}");
    assert!(!answer(&own).err().unwrap_or_default().contains("another file"));
}
