#!/bin/sh
# Create a CA, and certificates for the three brokers of compose.yaml and two users: `admin` with all rights, and `sluice`
# with granted rights. Existing files stay.
#
#   private/          mode 700: no other user of this host can read it; containers see only the folder that they mount
#   private/ca.key    for this script alone
#   private/kafka-1/  certificate of this broker; so for kafka-2 and kafka-3
#   private/admin/    certificate of the administrator
#   private/sluice/   certificate of Sluice
set -eu
umask 022
cd "$(dirname "$0")"
mkdir -p private && chmod 700 private
cd private
mkdir -p kafka-1 kafka-2 kafka-3 admin sluice
days=825
kind="ec -pkeyopt ec_paramgen_curve:prime256v1"

if ! [ -e ca.key ]; then
    # shellcheck disable=SC2086
    openssl req -x509 -newkey $kind -nodes -days "$days" -subj "/CN=sluice-ca" -keyout ca.key -out ca.pem 2>/dev/null
fi
for folder in kafka-1 kafka-2 kafka-3 admin sluice; do
    cp ca.pem "$folder/ca.pem"
done

# signed NAME: NAME.key and NAME.crt
signed() {
    # Names of a broker: for other hosts, and inside its container.
    printf 'subjectAltName=DNS:%s,DNS:localhost,IP:127.0.0.1\n' "$1" >extensions
    # shellcheck disable=SC2086
    openssl req -newkey $kind -nodes -subj "/CN=$1" -keyout "$1.key" -out request 2>/dev/null
    openssl x509 -req -in request -days "$days" -CA ca.pem -CAkey ca.key -CAcreateserial -extfile extensions \
        -out "$1.crt" 2>/dev/null
    rm request extensions
}

for name in kafka-1 kafka-2 kafka-3 admin; do
    # For Kafka's tools: a broker's own health check, and the administrator.
    cat >"$name/client.properties" <<END
security.protocol=SSL
ssl.truststore.type=PEM
ssl.truststore.location=/etc/kafka/secrets/ca.pem
ssl.keystore.type=PEM
ssl.keystore.location=/etc/kafka/secrets/$name.pem
END
    [ -e "$name/$name.pem" ] && continue
    signed "$name"
    cat "$name.key" "$name.crt" >"$name/$name.pem"
    rm "$name.key" "$name.crt"
done
if ! [ -e sluice/sluice.key ]; then
    signed sluice
    mv sluice.crt sluice/sluice.pem
    mv sluice.key sluice/sluice.key
fi
# Containers run as different users, none of them root.
chmod 644 kafka-*/* admin/* sluice/*
chmod 600 ca.key
