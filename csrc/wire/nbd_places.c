// SPDX-License-Identifier: Apache-2.0
/*
 * Who has a place at a TCP port: as infiniswap/control/places.py for the control port.
 *
 * An address proves nothing: an attacker may share that of an honest host, and may have many. So no
 * connection before GO keeps another one out. It holds its place until others need it, and the
 * longest waiting one goes first. Strangers, at addresses that have opened no export in the last
 * hour, share a part of the places.
 */
#define _GNU_SOURCE 1
#include <string.h>

#include "wire/nbd_conn.h"

#define KNOWN_NS       (3600ull * 1000000000ull)
#define STRANGERS_PART 2u
/* How long to wait for the end of a connection that was shut down: its thread only wakes up. */
#define LEAVE_MS 200u

/* Of all connections, seen from a host that wants one more. */
struct tally {
	uint32_t proved; /* of the host */
	uint32_t waiting;
	uint32_t strangers;                         /* of all */
	struct iswi_nbd_conn *own, *stranger, *any; /* the longest waiting */
	struct iswi_nbd_conn **free;
};

/* server->lock held. */
static void look_for_place(struct iswi_nbd_server *server, struct tally *tally)
{
	tally->free = NULL;
	for (uint32_t i = 0; i < server->config.connections_max && tally->free == NULL; i++)
		if (server->conns[i] == NULL)
			tally->free = &server->conns[i];
}

static void older(struct iswi_nbd_conn **oldest, struct iswi_nbd_conn *conn)
{
	if (*oldest == NULL || conn->number < (*oldest)->number)
		*oldest = conn;
}

/* server->lock held. */
static void count(struct iswi_nbd_server *server, const unsigned char *peer, struct tally *tally)
{
	memset(tally, 0, sizeof(*tally));
	for (uint32_t i = 0; i < server->config.connections_max; i++) {
		struct iswi_nbd_conn *conn = server->conns[i];
		const bool is_own = conn != NULL && memcmp(conn->peer, peer, PEER_BYTES) == 0;

		if (conn == NULL || conn->proved) {
			tally->proved += is_own;
			continue;
		}
		if (conn->displaced)
			continue;
		older(&tally->any, conn);
		if (is_own) {
			tally->waiting++;
			older(&tally->own, conn);
		}
		if (conn->stranger) {
			tally->strangers++;
			older(&tally->stranger, conn);
		}
	}
	look_for_place(server, tally);
}

/* server->lock held. */
static bool is_known(const struct iswi_nbd_server *server, const unsigned char *peer)
{
	const uint64_t now_ns = iswi_now_ns();

	for (unsigned i = 0; i < ISWI_NBD_KNOWN_MAX; i++)
		if (memcmp(server->known[i].peer, peer, PEER_BYTES) == 0)
			return now_ns < server->known[i].until_ns;
	return false;
}

/* server->lock held: takes the place of the peer itself, or of who was quiet longest. */
static void note_known(struct iswi_nbd_server *server, const unsigned char *peer)
{
	struct iswi_nbd_known *place = &server->known[0];

	for (unsigned i = 0; i < ISWI_NBD_KNOWN_MAX; i++) {
		struct iswi_nbd_known *known = &server->known[i];

		if (memcmp(known->peer, peer, PEER_BYTES) == 0) {
			place = known;
			break;
		}
		if (known->until_ns < place->until_ns)
			place = known;
	}
	memcpy(place->peer, peer, PEER_BYTES);
	place->until_ns = iswi_now_ns() + KNOWN_NS;
}

/* server->lock held. Who has to go for one more connection of the host; NULL: nobody, or nobody
 * may. */
static struct iswi_nbd_conn *choose(const struct iswi_nbd_server *server, const struct tally *tally,
				    uint32_t host_max, bool stranger)
{
	const uint32_t strangers_max = server->config.connections_max / STRANGERS_PART;

	if (tally->waiting >= host_max)
		return tally->own;
	if (stranger && tally->strangers >= ISWI_MAX(strangers_max, 1))
		return tally->stranger;
	if (tally->free != NULL)
		return NULL;
	return stranger || tally->stranger != NULL ? tally->stranger : tally->any;
}

/* server->lock held, and dropped while waiting: so no more threads run than there are places. */
static void displace(struct iswi_nbd_server *server, struct iswi_nbd_conn *loser)
{
	const uint64_t end_ns = iswi_now_ns() + LEAVE_MS * 1000000ull;
	const struct timespec end = {.tv_sec = (time_t)(end_ns / 1000000000u),
				     .tv_nsec = (long)(end_ns % 1000000000u)};
	struct iswi_nbd_conn **place = loser->place;
	const uint64_t number = loser->number;

	loser->displaced = true;
	iswi_nbd_conn_shutdown(loser);
	iswi_count(&server->connections_refused, 1);
	while (*place != NULL && (*place)->number == number)
		if (pthread_cond_timedwait(&server->left, &server->lock, &end) != 0)
			return;
}

struct iswi_nbd_conn **iswi_nbd_place(struct iswi_nbd_server *server, const unsigned char *peer,
				      bool *stranger_out)
{
	const uint32_t host_max = server->config.connections_per_host_max != 0
					  ? server->config.connections_per_host_max
					  : server->config.connections_max;
	struct iswi_nbd_conn *loser;
	struct tally tally;

	*stranger_out = false;
	if (peer == NULL) {
		look_for_place(server, &tally);
		return tally.free;
	}
	count(server, peer, &tally);
	if (tally.proved >= host_max)
		return NULL;
	*stranger_out = tally.proved == 0 && !is_known(server, peer);
	loser = choose(server, &tally, host_max, *stranger_out);
	if (loser != NULL) {
		displace(server, loser);
		look_for_place(server, &tally);
	}
	return tally.free;
}

bool iswi_nbd_prove(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_server *server = conn->server;

	pthread_mutex_lock(&server->lock);
	conn->proved = !conn->displaced;
	if (conn->proved)
		note_known(server, conn->peer);
	pthread_mutex_unlock(&server->lock);
	return conn->proved;
}
