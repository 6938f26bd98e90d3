# bash completion for hotplane. tests/install/options_agree.py holds it to what --help says.

_hotplane_options() {
  local general="--json --quiet --verbose --isa --help"
  case $1 in
    build)
      echo "$general --store --layers --tiers --delta --zero-mode --tp --device --workers
        --batch --staging-limit --stall-timeout --no-lock --trace"
      ;;
    boot)
      echo "$general --checkpoint --no-build --generation --rank --world --layers --experts
        --tiers --delta --delta-layers --no-delta-layers --pin-delta --device --base --memory
        --reserve --map --verify --dry-run --zero-mode --cache --workers --batch --staging-limit
        --stall-timeout --no-lock --trace"
      ;;
    warm) echo "$general --generation --rank --tiers --workers" ;;
    inspect) echo "$general --generation" ;;
    verify) echo "$general --generation --source --complete --layers --tiers --workers" ;;
    export)
      echo "$general --generation --rank --layer --part --expert --encoded --out --hf --checkpoint
        --precision --shard-size --planes-cache --checkpoint-id --tiers --delta --workers"
      ;;
    gc) echo "$general --generation --dry-run" ;;
    synth)
      echo "$general --geometry --layers --tiers --delta --checkpoint --mtp --shard-size --seed
        --workers"
      ;;
    doctor) echo "$general --store --generation --device --workers" ;;
    report) echo "$general --out --trace" ;;
    fidelity) echo "$general --store --generation --layers --workers" ;;
    import)
      echo "$general --planes-cache --layers-geometry --mtp-layers --config --key --rank --tiers
        --move --workers --stall-timeout --no-lock"
      ;;
    *) echo "--version --help" ;;
  esac
}

# The values that a word after an option may take; nothing: a file or a free value.
_hotplane_values() {
  case $1 in
    --tiers) echo "base base,delta" ;;
    --delta) echo "quintal nibble" ;;
    --zero-mode) echo "auto sign alt" ;;
    --cache) echo "keep bypass auto" ;;
    --verify) echo "all none" ;;
    --checkpoint) [[ ${COMP_WORDS[1]} == synth ]] && echo "mxfp4 nvfp4 fp8 bf16" ;;
    --base) echo "device host auto" ;;
    --precision) echo "base fp4 mixed:" ;;
    --device) echo "cpu cuda cuda:0" ;;
    --isa) echo "scalar avx2 avx512" ;;
    --part) echo "planes13 sc13 planes2 sc2 bias13 bias2 fp13 fp2" ;;
    --geometry | --layers-geometry) echo "ds4-flash glm-5.2 kimi-k2 gpt-oss-120b" ;;
    --layers | --delta-layers | --no-delta-layers) echo "main mtp" ;;
  esac
}

_hotplane() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} values
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 && $word != -* ]]; then
    values="build boot warm inspect verify export gc synth doctor report fidelity import"
  else
    values=$(_hotplane_values "$before")
    if [[ -z $values && $word == -* ]]; then
      values=$(_hotplane_options "${COMP_WORDS[1]}")
    fi
  fi
  if [[ -n $values ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$word")
  else
    mapfile -t COMPREPLY < <(compgen -f -- "$word")
  fi
}

complete -o filenames -F _hotplane hotplane
