"""What `--help` shows: the launcher's own, and a text for each command."""

from __future__ import annotations

USAGE = """\
usage: python -m launcher recipe=NAME [cluster=local|slurm|k8s] [action=render|run|submit] [KEY=VALUE ...]
       python -m launcher list [WORD]                   recipes that can be chosen
       python -m launcher show NAME [KEY=VALUE ...]     a recipe, resolved
       python -m launcher explain recipe=NAME [KEY=VALUE ...] [KEY ...]
                                                        where its values come from
       python -m launcher diff A B                      in what two recipes or runs differ
       python -m launcher init [slurm|k8s]              what a team's repository begins with
       python -m launcher init --script FILE            a recipe that runs your own script
       python -m launcher check [NAME ...]              is each recipe what its version says?
       python -m launcher history NAME                  its versions
       python -m launcher freeze recipe=NAME [KEY=VALUE ...]
                                                        a recipe as one file that stays as it is
       python -m launcher plan recipe=NAME [KEY=VALUE ...]
                                                        memory and time that it would take
       python -m launcher schema                        JSON Schema of a recipe, for editors
       python -m launcher report RUN [--json]           make a run's report again
       python -m launcher runs [FOLDER]                 the runs below ./runs, a line each
       python -m launcher status RUN                    how a run stands
       python -m launcher logs RUN [--rank N] [-f]      what it prints
       python -m launcher attach RUN                    its display, as where it was started
       python -m launcher cancel RUN                    end it
       python -m launcher scale RUN nodes=N             go on with another number of nodes
       python -m launcher continue RUN [KEY=VALUE ...]  go on from its newest state
       python -m launcher branch RUN[@STEP] [KEY=VALUE ...]
                                                        a new run that begins with its state
       python -m launcher clean RUN                     remove what it left beside its folder
       python -m launcher completion bash|zsh|fish      completion of the script `launcher`

  NAME is a recipe's name or the path of a .yaml file. KEY=VALUE overrides a key, +KEY=VALUE adds
  one to an open mapping such as env, GROUP=OPTION chooses another model, trainer, data or instance.
  RUN is a run's folder, or its name below ./runs.
  Quote a value that holds more than a word: "run.dir='a=b'".

  --cfg job          print the config instead        --info defaults-tree   show what includes what
  --multirun, -m     a job for each of KEY=A,B       --hydra-help           all of Hydra's options
  COMMAND --help     what a command takes            oversubscribe=true     run what this machine is
                                                                            too small for
"""  # noqa: E501

COMMANDS = {
    "list": """\
usage: python -m launcher list [--json] [WORD]

  Show the recipes that can be chosen here: the shipped ones, and those of your repository's
  recipes/. With a WORD, those that have it in their name, model, method, features or description.
  What a recipe asks of its user, and recipes that are broken, stand below the table.

  --json    the same as a JSON array, for programs
""",
    "show": """\
usage: python -m launcher show NAME [KEY=VALUE ...]

  Print a recipe as the job that it becomes: every key with its value, as YAML. NAME is a recipe's
  name or the path of a .yaml file; overrides are those of recipe=NAME.
""",
    "explain": """\
usage: python -m launcher explain recipe=NAME [KEY=VALUE ...] [KEY ...] [--all] [--json]

  Show for each KEY its value, the line of the file or the override that has set it, and what that
  replaced, from the newest to the first; for a reference also what it refers to. A KEY that is a
  section stands for all that lies below it. Without a KEY: those that a recipe or an override has
  set. A key whose value the files and overrides do not lead to is `unknown`.

  --all     every key
  --json    the same as a JSON array, for programs and editors, with the files' absolute paths
""",
    "diff": """\
usage: python -m launcher diff A B [--origins]

  Show each key whose resolved value is not the same in A and B: recipes, by name or as the path of
  a .yaml file, and runs, by folder or by name below ./runs. Of a recipe and a run, what the run's
  cluster and name are is left out. What is done with a job (action, run) is never compared.

  --origins    also the file and line of each value

  The exit status is 0 where they are equal, 1 where they differ, 2 where one cannot be read.
""",
    "init": """\
usage: python -m launcher init [slurm|k8s]
       python -m launcher init --script FILE

  Write what a team's repository begins with into the current folder: a profile of its cluster
  (conf/cluster/ours.yaml), a recipe (recipes/ours/first.yaml) and a hook for pre-commit that runs
  `check`. A file that is there stays as it is.

  --script FILE    write a recipe alone, recipes/FOLDER/NAME.yaml, that runs this script as it is,
                   with a line for each key that you may want to set
""",
    "check": """\
usage: python -m launcher check [--update -m 'WHY'] [NAME ...]

  Compare what each recipe of the repository, or each that is named, resolves to with the version
  that recipes.lock keeps of it. Where that differs, name the keys with both values and end with
  status 1.

  --update -m 'WHY'    raise the version of a recipe that has changed, and keep it: a file below
                       recipes/.versions and a line of recipes.lock, with WHY in it
""",
    "history": """\
usage: python -m launcher history NAME

  Print the versions of a recipe, the oldest first: date, digest and what changed.
""",
    "freeze": """\
usage: python -m launcher freeze recipe=NAME [KEY=VALUE ...]

  Print a recipe with its overrides as one file that resolves to the same job for ever; it needs no
  other but the profile of a cluster that the recipe chooses. Run it as recipe=FILE.yaml, with
  further overrides as usual.
""",
    "plan": """\
usage: python -m launcher plan recipe=NAME [KEY=VALUE ...] [--explain] [--json]

  Show what a job would take, before it is submitted: its parameters; the memory of the fullest
  device by part, and of a node; tokens, steps, device-hours and days against time_limit. Nothing is
  written. Of an instance without devices, as cpu, all that is theirs is left out.

  plan.mfu=SHARE    share of the devices' peak that is reached, above 0 to 1; 0.4 unless given
  --explain         how each number comes about, and where that is written
  --json            the same for programs: bytes, hours and days; formulas with --explain

  What surely does not fit is refused by action=submit unless plan.force=true. What probably does
  not is a note of rendering.
""",
    "schema": """\
usage: python -m launcher schema

  Print the JSON Schema of a recipe's file. Editors complete and check recipes with it: see the
  line `yaml-language-server` in the shipped ones.
""",
    "report": """\
usage: python -m launcher report RUN [--json]

  Make report.html of a run again from its events.jsonl, and print its path. With --json print what
  it tells instead, for programs: steps, rates, faults, and the seconds of all ranks in training,
  start, data wait, checkpoint stall, detection, teardown, repair, lost work, standstill and stop.
  RUN is a run's folder, or its name below ./runs.
""",
    "runs": """\
usage: python -m launcher runs [FOLDER]

  Show the runs below FOLDER, or below ./runs: name, state, steps, cluster, and why. The states are
  those of `status`, and so is the exit status.
""",
    "status": """\
usage: python -m launcher status RUN

  Show how a run stands: queued (and why), running, succeeded, failed (and the first error),
  cancelled, forgotten (the scheduler knows nothing of it any more, and its events tell of no end),
  or unreachable. RUN is a run's folder, or its name below ./runs.

  The exit status is 0 whatever the state, and 1 where the scheduler gives no answer: the events
  then say how long nothing was heard of the run.
""",
    "logs": """\
usage: python -m launcher logs RUN [--rank N] [-f]

  Print what a run's processes have printed, by time. Of a run that has failed, the first error
  comes first. Lines without a time of their own stay behind the line before them.

  --rank N        of one rank alone
  -f, --follow    go on until the run has ended
""",
    "attach": """\
usage: python -m launcher attach RUN

  Show the display of a run that was started elsewhere, until the run has ended. Ctrl-C leaves the
  display, and the run goes on.
""",
    "cancel": """\
usage: python -m launcher cancel RUN

  End a run: on this machine as Ctrl-C does, on a cluster by its scheduler. Waits until it has
  ended, for two minutes at most, and says how. A second time ends a run on this machine at once.
""",
    "scale": """\
usage: python -m launcher scale RUN nodes=N [--wait]

  Have an elastic run go on with N nodes, one of the sizes that its recipe allows: nodes are started
  (on Slurm by a job each, while the run's own job keeps its nodes, on Kubernetes as Jobs), and come
  in once they have been there for resilience.elastic.hold_s and the run has kept its size for
  scale_up_snooze_s; or some are asked to leave, and go after a step of all: those that do not train
  yet, then those that came last. --wait returns once the run trains with so many, within five
  minutes.
""",
    "continue": """\
usage: python -m launcher continue RUN [KEY=VALUE ...]

  Go on with a run that has ended, in its folder, from the newest whole state that any tier has. It
  is the run's own job, as it was resolved at its start. KEY=VALUE gives a key another value: what
  the state has to fit (the model's shapes, the tokenizer) may not change; what training makes of it
  may, and is said and noted. Groups cannot be chosen.

  A run whose learning rates decay over all its steps (trainer.optimizer.decay_steps=null) is given
  another trainer.max_steps together with one of:

    trainer.schedule=keep      the decay ends where it was to end
    trainer.schedule=stretch   the decay spans the new number of steps, from now on

  A run that ended because its store's namespace belongs to another one goes on from the other one's
  checkpoints with run.take_over=true, once that has ended. run.detach=true lets the command return
  once a run on this machine has started.
""",
    "branch": """\
usage: python -m launcher branch RUN[@STEP] [KEY=VALUE ...]

  Start a new run that begins with a state of another one, which may go on meanwhile: the newest
  that its store has, or that of STEP. The other run's state is read and never written. The new one
  has the other's own job, with other values for some keys as for `continue`, and a folder, a name
  and checkpoints of its own.

    run.name=NAME       its name; else that of the other, with -branch
    run.dir=FOLDER      its folder; else runs/NAME, or the next that is free
    run.detach=true     return once the run has started, on this machine
""",
    "clean": """\
usage: python -m launcher clean RUN

  Remove what a run that has ended has left on this machine and on its cluster: checkpoints and
  batches in the memory of its nodes, processes that a killed launcher could not end, a job that
  waits in the queue, and a Job, Service, ConfigMap and Secret on Kubernetes. The run's folder stays
  as it is: its record, logs, events and written checkpoints. Refused while the run goes on.

  The exit status is 1 where something could not be removed, or a node not be reached.
""",
    "completion": """\
usage: python -m launcher completion bash|zsh|fish

  Print what makes a shell complete keys, groups and recipes' names after the script `launcher`
  (not after `python -m launcher`). To have it in every shell:

    bash    echo 'eval "$(launcher completion bash)"' >>~/.bashrc
    zsh     echo 'eval "$(launcher completion zsh)"' >>~/.zshrc
    fish    launcher completion fish >~/.config/fish/completions/launcher.fish
""",
}
"""The text of each command's --help, by its name."""
