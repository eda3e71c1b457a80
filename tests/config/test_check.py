"""Nothing that a user writes can vanish: unknown keys, wrong types and unknown options, all at once, with a way out."""

import pytest

from trainer.config.check import check, for_hydra, parse, problems_in, without_null_picks
from trainer.config.compose import plan
from trainer.config.shelf import recipes
from trainer.errors import ConfigError


def problems(*words: str) -> list[str]:
    return problems_in(parse(list(words)))


def problem(*words: str) -> str:
    (only,) = problems(*words)
    return only


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Puts a recipe of the user's own into ./recipes; returns its file."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "mine"):
        (tmp_path / "recipes").mkdir(exist_ok=True)
        file = tmp_path / "recipes" / f"{name}.yaml"
        file.write_text(text)
        return file

    return write


RIGHT = [
    ("recipe=quickstart",),
    ("optim=adamw", "optim.eps=1e-9", "optim.betas=[0.8,0.9]"),
    ("seed=0", "device=cpu", "debug=true", "output_dir=a/b"),
    ("train=default", "train.max_steps=null", "train.max_grad_norm=null"),
    ("schedule=wsd", "schedule.decay_ratio=0.5", "schedule.warmup_steps=3"),
    ("quant=int8", "quant.outlier_threshold=0"),
    ("model.architecture.num_hidden_layers=2",),
    ("model.architecture={num_hidden_layers: 2}",),
    ("+model.architecture.mlp_bias=true",),
    ("++model.architecture={mlp_bias: true}",),
    ("adapter.target_modules=[q_proj,v_proj]",),
    ("optim.learning_rate=${schedule.warmup_ratio}",),
    ("hydra.job.name=x", "hydra/launcher=basic", "+hydra.job.env_set.A=b"),
    ("track=wandb", "track.name=a"),
]


@pytest.mark.parametrize("words", RIGHT, ids=" ".join)
def test_what_is_right_passes(words):
    assert problems(*words) == []


WRONG = [
    # C1: misspelt; the right key in the wrong section; with Hydra's ways of adding
    ("optim.leraning_rate=1", "optim.leraning_rate: unknown key (did you mean optim.learning_rate?)"),
    ("train.learning_rate=1", "train.learning_rate: unknown key (did you mean optim.learning_rate?)"),
    ("train.max_lenght=5", "train.max_lenght: unknown key (did you mean data.max_length?)"),
    ("+optim.leraning_rate=1", "optim.leraning_rate: unknown key (did you mean optim.learning_rate?)"),
    ("++optim.leraning_rate=1", "optim.leraning_rate: unknown key (did you mean optim.learning_rate?)"),
    ("+optim.foo=1", "optim.foo: unknown key. optim has: learning_rate, weight_decay, betas, eps"),
    ("++optim.foo=1", "optim.foo: unknown key. optim has: learning_rate, weight_decay, betas, eps"),
    ("+foo=1", "foo: unknown key"),
    ("++foo.bar=1", "foo.bar: unknown key"),
    ("learning_rate=1", "learning_rate: unknown key (did you mean optim.learning_rate?)"),
    ("trian.epochs=2", "trian.epochs: unknown key (did you mean train.epochs?)"),
    ("sede=2", "sede: unknown key (did you mean seed?)"),
    ("optmi=adamw", "optmi: unknown key (did you mean optim?)"),
    ("schema/optim=adamw", "schema/optim: unknown key"),
    ("quant.outlier_threshold=6", "quant.outlier_threshold: unknown key. quant has: double_quant"),
    # nested
    ("optim.learning_rate.x=1", "optim.learning_rate.x: unknown key; optim.learning_rate has no parts"),
    ("seed.x=1", "seed.x: unknown key; seed has no parts"),
    ("model.architecture.hidden_sise=1", "unknown key (did you mean hidden_size?)"),
    ("model.architecture={hidden_sise: 1}", "unknown key (did you mean hidden_size?)"),
    ("model.architecture.mlp_bias=true", "added on the command line with +model.architecture.mlp_bias="),
    ("model.architecture.hidden_size.x=1", "model.architecture.hidden_size has no parts"),
    # taking away
    ("~optim.eps", "~optim.eps: a setting cannot be taken away"),
    ("~optim.esp", "optim.esp: unknown key (did you mean optim.eps?)"),
    ("~optim", "~optim: a group cannot be taken away"),
    # options
    ("quant=nf5", "quant=nf5: no such option (did you mean nf4?). Allowed: fp4, int8, nf4, none"),
    ("optim=null", "optim=null: no such option"),
    ("optim=", "optim=: no such option"),
    ("optim={a: 1}", "no such option"),
    ("train=fast", "train=fast: no such option. Allowed: default"),
    ("recipe=quikstart", "recipe=quikstart: no such option (did you mean quickstart?)"),
    ("sweep=learning_rte", "sweep=learning_rte: no such option (did you mean learning_rate?)"),
    ("+optim=adamw", "an option is picked with optim=option"),
    ("optim@data=adamw", "an option is picked with optim=option"),
    ("seed@data=1", "seed@data=1: unknown key"),
    # types
    ("seed=1.5", "seed=1.5: must be a whole number"),
    ("seed=", "seed=: must be a whole number"),
    ("debug=1", "debug=1: must be true or false"),
    ("device=gpu", "device=gpu: must be one of auto, cuda, cpu"),
    ("device=cdua", "(did you mean cuda?)"),
    ("optim.weight_decay=abc", "optim.weight_decay=abc: must be a number"),
    ("optim.betas=0.9", "optim.betas=0.9: must be a list of numbers"),
    ("train.epochs=null", "train.epochs=null: must be a whole number"),
    ("train.max_steps=x", "train.max_steps=x: must be a whole number or null"),
    ("data.train_on=assistent", "(did you mean assistant?)"),
    ("data.path=[a,b]", "must be text or null"),
    ("+seed=x", "seed=x: must be a whole number"),
    # several values without -m
    ("optim.learning_rate=1e-4,2e-4", "several values. To sweep over them add -m; a list is written"),
    ("optim=adamw,adamw_8bit", "several values. To sweep over them add -m"),
]


@pytest.mark.parametrize(("word", "words"), WRONG)
def test_what_is_wrong_is_named(word, words):
    assert words in problem(word)


def test_all_at_once_and_each_once():
    words = ["optim.leraning_rate=1", "seed=x", "quant=nf5", "seed=x", "trian.epochs=1", "~optim.eps"]
    with pytest.raises(ConfigError) as refused:
        check(parse(words))
    assert refused.value.exit_code == 2
    lines = str(refused.value).splitlines()
    assert lines[0] == "5 problems:"
    assert all(line.startswith("  - ") for line in lines[1:]) and len(lines) == 6


def test_keys_are_those_of_the_options_that_are_picked():
    assert problems("quant=int8", "quant.outlier_threshold=5") == []
    assert "quant has: outlier_threshold" in problem("quant=int8", "quant.double_quant=true")
    assert problems("recipe=pretrain_tiny", "quant=nf4", "quant.double_quant=false") == []
    assert "quant has: no keys" in problem("recipe=pretrain_tiny", "quant.double_quant=false")


@pytest.mark.parametrize(
    "word", ["a=b=c", "optim.betas=[1", "seed", "foo bar", "optim={learning_rate:", "=1", "seed=${", "a=(b", "x y=1"]
)
def test_bad_grammar_is_refused_with_the_word(word):
    with pytest.raises(ConfigError) as refused:
        parse([word])
    assert str(refused.value).startswith(f"{word}: cannot be read")


def test_all_bad_grammar_at_once():
    with pytest.raises(ConfigError, match=r"^2 problems:"):
        parse(["a=b=c", "seed=1", "optim.betas=[1"])


def test_null_picks_nothing():
    assert without_null_picks(parse(["recipe=null", "sweep=null", "seed=1"])) == parse(["seed=1"])
    assert without_null_picks(parse(["recipe=quickstart", "recipe=null"])) == []
    assert len(without_null_picks(parse(["recipe=null", "recipe=quickstart", "optim.eps=null"]))) == 3


def test_hydra_is_told_that_an_entry_of_a_mapping_may_be_new():
    words = [
        "seed=1",
        "data.columns.prompt=q",
        "data.columns={prompt: q}",
        "+data.columns.a=b",
        "hydra.job.env_set.A=b",
    ]
    assert for_hydra(parse(words)) == [
        "seed=1",
        "++data.columns.prompt=q",
        "++data.columns={prompt: q}",
        "+data.columns.a=b",
        "hydra.job.env_set.A=b",
    ]


# Recipes


def test_a_recipes_mistakes_have_their_lines_and_come_all_at_once(write):
    file = write(
        "# What.\n"
        "defaults:\n  - override /optim: adamw\n"
        "optim:\n  leraning_rate: 1\n  eps: small\n"
        "trian:\n  epochs: 1\n"
        "train:\n  epochs: 1.5\n"
        "model:\n  architecture:\n    hidden_sise: 3\n"
        "seed: null\n"
        "quant: nf4\n"
    )
    found = problems("recipe=mine", "sede=1")
    assert [line.removeprefix(f"{file}:").split(": ")[0] for line in found[:-1]] == "5 6 7 10 13 14 15".split()
    for line, words in zip(
        found,
        [
            "optim.leraning_rate: unknown key (did you mean optim.learning_rate?)",
            "optim.eps=small: must be a number",
            "trian: unknown key (did you mean train?)",
            "train.epochs=1.5: must be a whole number",
            "hidden_sise: unknown key (did you mean hidden_size?)",
            "seed=null: must be a whole number",
            "quant: is a group, not a setting",
            "sede: unknown key (did you mean seed?)",
        ],
        strict=True,
    ):
        assert words in line


def test_packaged_recipes_have_no_mistakes():
    for name in recipes():
        assert problems(f"recipe={name}") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults:\n  - override /optmi: adamw", ":1: optmi: unknown group (did you mean optim?)"),
        ("defaults:\n  - override /optim: adamv", "optim=adamv: no such option (did you mean adamw?)"),
        ("defaults:\n  - /optim: adamw", "write `override /optim: adamw`"),
        ("defaults:\n  - optim: adamw", "write `override /optim: adamw`"),
        ("defaults:\n  - override optim: adamw", "write `override /optim: adamw`"),
        ("defaults:\n  - /optim/adamw", "no such recipe to start from"),
        ("defaults:\n  - quikstart", "no such recipe to start from (did you mean quickstart?)"),
        ("defaults:\n  - override /recipe: quickstart", "recipe: unknown group"),
        ("defaults: {optim: adamw}", "defaults is a list"),
        ("defaults:\n  - [a]", "unknown group"),
        ("seed: 1\nrecipe: other", ":2: recipe=other: is the file's name, mine"),
    ],
)
def test_a_recipes_defaults_are_closed_too(write, text, words):
    file = write(text)
    found = problem("recipe=mine")
    assert found.startswith(f"{file}:")
    assert words in found


def test_a_recipe_may_start_from_another_and_may_fill_mappings(write):
    write("defaults:\n  - quickstart\n  - override /optim: adamw\noptim:\n  eps: 1e-9\n")
    write("defaults:\n  - mine\n  - _self_\ndata:\n  columns: {prompt: q}\n", "more")
    assert problems("recipe=more", "optim.eps=1e-7") == []


def test_what_a_recipe_starts_from_is_held_against_the_final_options(write):
    base = write("defaults:\n  - override /quant: int8\nquant:\n  outlier_threshold: 5.0\n", "base")
    write("defaults:\n  - base\n  - override /quant: nf4\n")
    assert f"{base}:4: quant.outlier_threshold: unknown key. quant has: double_quant" in problem("recipe=mine")


def test_recipes_that_start_from_each_other_are_refused(write):
    write("defaults: [b]", "a")
    write("defaults: [a]", "b")
    assert any("in a circle: a > b" in line for line in problems("recipe=a"))


def test_a_broken_recipe_breaks_only_itself(write):
    write("seed: [1", "broken")
    assert problems("recipe=quickstart") == []
    with pytest.raises(ConfigError, match=r"broken\.yaml:1: not YAML"):
        problems("recipe=broken")


@pytest.mark.parametrize("depth", [200, 5000])
def test_a_value_nested_deeply_is_no_bug(depth):
    with pytest.raises(ConfigError, match="nested too deeply|cannot be read"):
        plan(["data.path=x", "model.path=y", f"model.mlp_tiles={'[' * depth}{']' * depth}"])
