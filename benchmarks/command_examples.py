"""Examples of every command, for its page in docs/reference. `tests/heed/test_documented_commands.py` parses them."""

EXAMPLES = {
    "heed run": """
heed run                                            # the built-in demo
heed run mine.toml
heed run mine.toml --set ppo.kl.coef=0.1            # only PPO and what follows it run again
heed run mine.toml --from reward                    # rerun this stage and all later ones
""",
    "heed loop": """
heed loop mine.toml
heed loop mine.toml --set loop.labels=8000 --set loop.rounds=8      # more rounds, if 5000 labels were for 5
heed loop mine.toml --no-wait                                       # end when people's labels are needed
""",
    "heed init": """
heed init mine.toml --model Qwen/Qwen2.5-0.5B --demonstrations demos.jsonl \\
    --preferences pairs.jsonl --prompts prompts.jsonl
heed init dpo.toml --model my-sft-model --preferences trl-lib/ultrafeedback_binarized
heed init grpo.toml --model my-sft-model --prompts prompts.jsonl --reward rewards.py:score --algorithm grpo
heed init kto.toml --model my-sft-model --preferences labels.jsonl --reward judge.py:score   # TRL's unpaired rows
heed init loop.toml --model my-model --demonstrations demos.jsonl --prompts prompts.jsonl --algorithm loop
heed init classify.toml --model bert-base-cased --demonstrations texts.jsonl                 # text and label
""",
    "heed submit": """
heed submit mine.toml --runs /shared/runs --address http://head:8265
heed submit mine.toml --runs /shared/runs --only sft --no-follow       # with HEED_ADDRESS set
heed submit mine.toml --runs /shared/runs --dry-run                    # list what would be sent
heed submit mine.toml --runs /shared/runs --slurm --gpus-per-node 8    # as a Slurm job, with a Ray cluster of its own
""",
    "heed merge-adapter": """
heed merge-adapter my-adapter merged
heed merge-adapter my-adapter merged --base meta-llama/Meta-Llama-3-8B
""",
    "heed export gguf": """
heed export gguf runs/mine/ppo policy.gguf
heed export gguf runs/mine/ppo policy.gguf --type q8_0      # half the size
""",
    "heed compare": """
heed compare runs/mine/sft/model runs/mine/ppo/model --prompts heldout_prompts.jsonl --judge runs/mine/reward/model
heed compare old=old.jsonl new=new.jsonl --prompts prompts.jsonl --judge people:labels.sqlite
""",
    "heed verdicts": """
heed verdicts annotations.json
heed verdicts gpt-4=battles.jsonl --format arena --out runs/arena
""",
    "heed judge": """
heed judge runs/mine/compare people:labels.sqlite
heed judge runs/mine/compare strict=judge.py:score
""",
    "heed judge-quality": """
heed judge-quality judge.py:score LLMBar/Dataset/LLMBar/Natural/dataset.json --out runs/judge-quality
heed judge-quality 'gpt-4=https://api.example.org/v1#gpt-4' mt_bench_human.jsonl --max-tasks 200
heed judge-quality runs/mine/reward/model rankings.jsonl
""",
    "heed evaluate": """
heed evaluate runs/mine/sft/model runs/mine/ppo/model --suite gsm8k --data grade-school-math
heed evaluate old=old.jsonl new=runs/mine/ppo/model --suite gsm8k --max-items 200
heed evaluate runs/mine/sft/model runs/mine/ppo/model --suite harness:hellaswag --max-items 200
""",
    "heed plan": """
heed plan mine.toml                                 # on this machine's CPU
heed plan mine.toml --gpu h100 --gpus-per-node 1
heed plan configs/jobs/cluster/hh-8b-8gpus.toml --gpu h100 --price 2.50
""",
    "heed report": """
heed report runs/mine
heed report runs/mine/compare
""",
    "heed watch": """
heed watch runs/mine                                # then open http://127.0.0.1:8200
heed watch /shared/runs/mine --port 0
""",
    "heed classify": """
heed classify runs/classify/classify/model "Mia has a red kite."
heed classify runs/classify-entities/classify/model "Mia has a red kite."
heed classify runs/classify-questions/classify/model "Mia has a red kite." --question "What does Mia have?"
""",
    "heed arena": """
heed arena runs/mine/sft/model runs/mine/ppo/model --store labels.sqlite        # http://127.0.0.1:8100, and a link
heed arena runs/mine other='https://llm.example.org/v1#other-model' --store labels.sqlite --prompts prompts.jsonl
""",
    "heed chat": """
heed chat runs/mine/ppo/model
heed chat runs/mine/sft/model --best-of 16 --judge runs/mine/reward/model
echo "Please thank Mia." | heed chat runs/mine/ppo/model --temperature 0
""",
    "heed complete": """
heed complete runs/demo/pretrain/model "Mia has a red"
heed complete runs/demo/pretrain/model "Mia has a red" --beams 3 --max-new-tokens 8
heed complete runs/demo/pretrain/model "Mia has a red kite." --max-new-tokens 0 --logprobs    # score a sentence
heed complete runs/encoder/pretrain/model "Mia has a [MASK] kite."
heed complete runs/demo/pretrain/model "Mia has a red kite." --tokens
""",
    "heed few-shot": """
heed few-shot runs/demo/pretrain/model examples.jsonl --shots 0 --shots 4
heed few-shot models/SmolLM2-135M-Instruct.gguf configs/few_shot/grammar.jsonl --shots 0 --shots 4 --shots 16
""",
    "heed replay": """
heed replay runs/demo --iteration 17 --response 12
""",
    "heed verify-sampler": """
heed verify-sampler heed runs/demo/sft/model
heed verify-sampler vllm my-model --precision bf16
heed verify-sampler engine.py:load my-model         # an engine of your own
""",
    "heed jobs list": """
heed jobs list --address http://head:8265
""",
    "heed jobs status": """
heed jobs status mine-1a2b3c
""",
    "heed jobs logs": """
heed jobs logs mine-1a2b3c -f
""",
    "heed jobs stop": """
heed jobs stop mine-1a2b3c
""",
    "heed label import": """
heed label import pairs.jsonl --check               # read and report, store nothing
heed label import pairs.jsonl --store labels.sqlite --batch first
heed label import helpful-base.jsonl --format hh --objective helpful --store labels.sqlite --batch helpful
""",
    "heed label export": """
heed label export --store labels.sqlite --batch main --format consensus --out rankings.jsonl
heed label export --store labels.sqlite --format trl --out pairs.parquet
heed label export --store labels.sqlite --names --out all.jsonl        # everything, with names
""",
    "heed label sample": """
heed label sample runs/mine/sft/model --prompts prompts.jsonl --store labels.sqlite --batch main
heed label sample runs/mine/ppo/model --prompts prompts.jsonl --store labels.sqlite --batch hard \\
    --judge runs/mine/reward/model
""",
    "heed label outputs": """
heed label outputs polite=polite.jsonl curt=curt.jsonl --prompts prompts.jsonl \\
    --store labels.sqlite --batch main --labelers 3
""",
    "heed label serve": """
heed label serve --store labels.sqlite --new        # http://127.0.0.1:8100, and a link for the first lead
heed label serve --store labels.sqlite --config label.toml --public-url https://labels.example.org
""",
    "heed label invite": """
heed label invite ann --store labels.sqlite
heed label invite lea --lead --store labels.sqlite --public-url https://labels.example.org
""",
    "heed label person": """
heed label person ann --store labels.sqlite --out ann.json
""",
    "heed label erase": """
heed label erase ann --store labels.sqlite
""",
    "heed label backup": """
heed label backup --store labels.sqlite --out backups/2026-11-26.sqlite
""",
    "heed label restore": """
heed label restore backups/2026-11-26.sqlite --store restored.sqlite --current labels.sqlite
heed label restore backups/2026-11-26.sqlite --store postgresql://heed@db/labels   # the store itself is lost
""",
    "heed measure kl": """
heed measure kl runs/mine/ppo/model runs/mine/sft/model --prompts heldout_prompts.jsonl
""",
    "heed measure tax": """
heed measure tax runs/demo/pretrain/model runs/demo/ppo/model --text heldout.txt --few-shot examples.jsonl
""",
    "heed inspect": """
heed inspect runs/mine/sft/model
heed inspect configs/jobs/demo.toml
""",
}
