# The guest's end of a root shell on a virtio serial port: run by systemd as `bash rootshell.sh PORT-NAME`, and by the
# tests as `bash rootshell.sh -` on standard input and output. The host's end, and what is said there, is rootshell.py.
# Nothing but bash, coreutils and util-linux is needed, and no udev: the port is found in sysfs.
set -u
mark=@vmlab
if [ "$1" = - ]; then
    exec 3<&0 4>&1
else
    port=
    for name in /sys/class/virtio-ports/*/name; do
        [ -r "$name" ] && [ "$(<"$name")" = "$1" ] && port=/dev/$(basename "$(dirname "$name")")
    done
    [ -n "$port" ] || { echo "cannot find a virtio port named $1" >&2; exit 1; }
    # One descriptor for both ways: a port can be opened only once.
    exec 3<>"$port" 4>&3 || exit 1
fi
exec </dev/null >&2
folder=$(mktemp -d "${VMLAB_RUN:-/run}/rootshell.XXXXXX") || exit 1
trap 'rm -rf "$folder"' EXIT
instance=$(</proc/sys/kernel/random/uuid)
boot=$(</proc/sys/kernel/random/boot_id)

# One frame at a time; it begins with a line's end, so that what is left of a broken one does not hide it.
frame() { (flock 9 && printf '\n%s %s\n' "$mark" "$1" && if [ $# -gt 1 ]; then cat "$2"; fi) 9>>"$folder/lock" >&4; }

# The command's group; or the command alone, if it has not become a leader yet.
end() { kill -KILL -- "-$1" 2>/dev/null || kill -KILL "$1" 2>/dev/null; }

# The answer comes when the command has ended, also when something that it left behind still holds its output.
run() {
    local file=$folder/$1
    setsid bash "$file.sh" <"$file.in" >"$file.out" 2>"$file.err" 3<&- 4>&- &
    echo $! >"$file.pid"
    [ ! -e "$file.kill" ] || end $!
    wait $!
    local status=$?
    base64 "$file.out" >"$file.answer"
    local size
    size=$(stat -c %s "$file.answer")
    base64 "$file.err" >>"$file.answer"
    frame "done $1 $status $size $(($(stat -c %s "$file.answer") - size))" "$file.answer"
    rm -f "$file".*
}

# $1 characters of base64 from the host; head reads no further.
receive() { if [ "$1" = 0 ]; then : >"$2"; else head -c "$1" <&3 | base64 -d >"$2"; fi; }

frame "ready $instance $boot"
# -n makes bash read byte by byte, whatever the line is: what follows a frame is for `receive`.
while read -r -n 512 word verb token script input <&3; do
    [ "$word" = "$mark" ] || continue
    case $verb in
    hello) frame "hello $token $instance $boot" ;;
    run)
        receive "$script" "$folder/$token.sh" && receive "$input" "$folder/$token.in"
        run "$token" &
        ;;
    kill)
        : >"$folder/$token.kill" # for a command that is about to start
        [ ! -e "$folder/$token.pid" ] || end "$(<"$folder/$token.pid")"
        ;;
    esac
done
