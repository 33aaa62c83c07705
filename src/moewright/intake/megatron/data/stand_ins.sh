# Read by every bash of a captured run, before its script. $MOEWRIGHT_STAND_INS is the folder of the
# stand-ins: a function stands for each, so that a script may change PATH.

for _moewright_path in "$MOEWRIGHT_STAND_INS"/*; do
  eval "${_moewright_path##*/}() { \"\$MOEWRIGHT_STAND_INS/${_moewright_path##*/}\" \"\$@\"; }"
done
unset _moewright_path

# A trainer that is called by its full path gets a function of that name before it starts.
_moewright_catch() {
  local first=${BASH_COMMAND%%[[:space:]]*} program name
  case $first in
    *'$('* | *'`'*) return 0 ;;
    */torchrun | */python* | */deepspeed | */accelerate | \"* | \$*) ;;
    *) return 0 ;;
  esac
  eval "program=$first" 2> /dev/null || return 0
  case $program in
    "$MOEWRIGHT_STAND_INS"/*) return 0 ;;
    */torchrun | */deepspeed | */accelerate) name=${program##*/} ;;
    */python | */python2*) name=python ;;
    */python3*) name=python3 ;;
    *) return 0 ;;
  esac
  eval "function $program { \"\$MOEWRIGHT_STAND_INS/$name\" \"\$@\"; }"
}
set -o functrace
trap _moewright_catch DEBUG
