#!/bin/bash
# Boots a User-Mode-Linux kernel whose root is this machine's file tree, with an NFS server and two NFS clients inside,
# and runs a command there. Kernel, server and client are Debian's:
#   apt-get install --no-install-recommends user-mode-linux kmod iproute2 nfs-common nfs-kernel-server rpcbind
#
#   boot.sh VERSION OPTIONS FOLDER COMMAND...
#
# VERSION 3 or 4.2; OPTIONS further mount options; FOLDER an empty one for logs. The command finds the server's folder
# at /mnt/exported and the same folder mounted at /mnt/a and /mnt/b by two clients in network namespaces of their own.
# It may call "nfs-server stop|start", "nfs-cut a|b on|off" (the client's cable) and "nfs-netem 'delay 5ms loss 1%'"
# (tc-netem on what the server sends; '' ends it). Exit status: the command's, or 125.
set -u
version=$1 options=$2 folder=$3
shift 3
mkdir -p "$folder/bin"
printf '%q ' "$@" >"$folder/command"
{ export -p | grep -vE ' (SHLVL|OLDPWD|TMPDIR|_)='; echo "cd $(printf %q "$PWD")"; } >"$folder/environment"

cat >"$folder/bin/nfs-server" <<'X'
#!/bin/bash
rpc.nfsd $([ "$1" = start ] && echo 4 || echo 0)
X
cat >"$folder/bin/nfs-cut" <<'X'
#!/bin/bash
ip link set "server-$1" $([ "$2" = on ] && echo down || echo up)
X

cat >"$folder/bin/nfs-netem" <<'X'
#!/bin/bash
for client in a b; do
    tc qdisc del dev server-$client root 2>/dev/null
    [ -z "$1" ] || tc qdisc add dev server-$client root netem $1 || exit 1
done
exit 0
X

cat >"$folder/init" <<X
#!/bin/bash
folder=$folder version=$version options=$options
X
cat >>"$folder/init" <<'X'
exec >"$folder/boot.log" 2>&1
export PATH=$folder/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
for place in /run /mnt /var/lib/nfs /dev/shm; do mkdir -p $place; mount -t tmpfs tmpfs $place; done
mkdir -p /run/lib /run/rpc_pipefs /run/lock /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/v4recovery
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state
ln -s /usr/lib/uml/modules /run/lib/modules  # where modprobe -d looks
for module in nfs nfsv3 nfsv4 nfsd veth sch_netem; do modprobe -d /run $module; done
ip link set lo up
mkdir -p /mnt/exported /mnt/a /mnt/b
mount -t tmpfs -o size=256m,mode=0777 tmpfs /mnt/exported
mount -t nfsd nfsd /proc/fs/nfsd
echo 10 >/proc/fs/nfsd/nfsv4leasetime  # seconds; the defaults make a restarted server wait for 90
echo 10 >/proc/fs/nfsd/nfsv4gracetime
subnet=0
for client in a b; do
    subnet=$((subnet + 1))
    ip netns add $client
    ip link add server-$client type veth peer name eth0 netns $client
    ip addr add 198.51.100.$((subnet * 16 + 1))/28 dev server-$client
    ip link set server-$client up
    ip netns exec $client ip addr add 198.51.100.$((subnet * 16 + 2))/28 dev eth0
    ip netns exec $client ip link set eth0 up
    ip netns exec $client ip link set lo up
done
rpcbind -w
rpc.statd --no-notify
exportfs -i -o rw,async,insecure,no_root_squash,no_subtree_check,fsid=0 198.51.100.0/24:/mnt/exported
rpc.nfsd 4
rpc.mountd
if [ $version = 3 ]; then source=/mnt/exported options=nolock,$options; else source=/; fi
subnet=0
for client in a b; do
    subnet=$((subnet + 1))
    # v4 servers tell clients apart by this, not by their address
    [ $version = 3 ] || ip netns exec $client sh -c "echo $client >/sys/fs/nfs/net/nfs_client/identifier"
    nsenter --net=/run/netns/$client \
        mount -t nfs -o vers=$version,proto=tcp,nosharecache,$options 198.51.100.$((subnet * 16 + 1)):$source /mnt/$client
done
grep ' /mnt/' /proc/mounts
( . "$folder/environment"; export PATH=$folder/bin:$PATH TMPDIR=/run; eval "$(cat "$folder/command")" ) >"$folder/output" 2>&1
echo $? >"$folder/status"
umount -f -l /mnt/a /mnt/b
sync
poweroff -f
sleep 60
X
chmod +x "$folder/init" "$folder"/bin/*
TMPDIR=/dev/shm linux.uml mem=1024M rootfstype=hostfs rootflags=/ rw "init=$folder/init" con=null con0=null,fd:1 quiet \
    </dev/null >"$folder/console" 2>&1
exit "$(cat "$folder/status" 2>/dev/null || echo 125)"
