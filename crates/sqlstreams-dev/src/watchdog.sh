# Ends a private server and removes its folder once the process that owns both
# is gone, however it went. Started with the folder and the data folder as
# arguments. The owner holds the other end of standard input and writes the id
# of each process it starts there; end of file means that the owner is gone.

dir=$1
data=$2
last=

# Whatever PATH the owner had, these tools are needed.
PATH=$PATH:/usr/bin:/bin:/usr/sbin:/sbin

# A closed terminal or a Ctrl-C must not end this before its work is done.
trap '' HUP INT TERM QUIT PIPE

# Only ever a process that was started on this data folder.
ours() {
    case $1 in '' | *[!0-9]* | 0 | 1) return 1 ;; esac
    if [ -r /proc/self/cmdline ]; then
        line=$(tr '\0' ' ' <"/proc/$1/cmdline") || return 1
    else
        line=$(ps -ww -o command= -p "$1") || return 1
    fi
    case $line in *"$data"*) return 0 ;; esac
    return 1
}

while read -r pid; do
    last=$pid
done

case $dir in /*) ;; *) exit 0 ;; esac
[ -d "$dir" ] || exit 0

# A server that was restarted by someone else is found by its own file.
current=
[ -r "$data/postmaster.pid" ] && read -r current <"$data/postmaster.pid"

for pid in $current $last; do
    # Immediate shutdown, as the data is about to go; then less politely.
    ours "$pid" && kill -QUIT "$pid"
    tries=0
    while ours "$pid" && [ $tries -lt 100 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    ours "$pid" && kill -KILL "$pid"
done

# A server that was killed couldn't give back the System V segment that guards
# its data folder; the 7th line of its file names it by key and id.
if [ -r "$data/postmaster.pid" ]; then
    id=$(sed -n '7s/^ *[0-9]* *\([0-9]*\) *$/\1/p' "$data/postmaster.pid")
    [ -n "$id" ] && ipcrm -m "$id"
fi

# Processes of a killed server may still write for a moment.
tries=0
while [ -e "$dir" ] && [ $tries -lt 50 ]; do
    rm -rf -- "$dir" || sleep 0.1
    tries=$((tries + 1))
done
exit 0
