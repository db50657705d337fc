/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fixed lot of request buffers, shared by the connections of an NBD front end. A buffer is taken
 * when a request arrives and comes back when its answer has left, so a client that reads nothing
 * keeps what it has got. Each connection therefore has a share:
 *
 * - The shares are equal. One buffer is left out for each place that nobody has taken yet.
 * - Nobody's first buffer is ever given to somebody who has one: as long as there are places, a
 *   connection that comes later gets a buffer at once, whatever the others hold.
 * - When connections come, shares become smaller. One that holds more than its share takes nothing
 *   until enough came back; iswi_nbd_share_exceeded tells it, and the server ends a connection
 *   whose client does not let go.
 */
#ifndef ISWI_NBD_SHARE_H
#define ISWI_NBD_SHARE_H

#include "util/util.h"
#include "wire/nbd_server.h"

struct iswi_nbd_share;

/* A connection's side; fields under share->lock. */
struct iswi_nbd_client {
	struct iswi_nbd_share *share;
	pthread_cond_t changed; /* it may take one now; only its own thread waits */
	uint32_t taken;
	bool joined;
	bool waiting;
};

struct iswi_nbd_share {
	pthread_mutex_t lock; /* nothing is called with it held */
	struct iswi_nbd_client *clients;
	uint32_t clients_max;
	uint32_t count;  /* buffers */
	uint32_t places; /* connections that are sure of a buffer; 0: there are no shares */
	uint32_t joined;
	uint32_t served; /* of those joined: they hold at least one */
	uint32_t waiting;
	uint32_t free_count;
	struct iswi_nbd_request *free;
};

/*
 * For `count` buffers and at most clients_max connections. fair false: whoever comes takes what is
 * there; for clients that bound themselves. 0 or -errno.
 */
int iswi_nbd_share_init(struct iswi_nbd_share *share, uint32_t clients_max, uint32_t count,
			bool fair);
void iswi_nbd_share_fini(struct iswi_nbd_share *share);
/* One of the `count`, before the first connection. Borrowed until fini. */
void iswi_nbd_share_add(struct iswi_nbd_share *share, struct iswi_nbd_request *request);

/* Any thread, does not block. At most clients_max at a time; leave when everything is back. */
struct iswi_nbd_client *iswi_nbd_share_join(struct iswi_nbd_share *share);
void iswi_nbd_share_leave(struct iswi_nbd_client *client);

/* The connection's own thread: waits until the client may have one. */
struct iswi_nbd_request *iswi_nbd_share_take(struct iswi_nbd_client *client);
/* Any thread, does not block. */
void iswi_nbd_share_give(struct iswi_nbd_client *client, struct iswi_nbd_request *request);
/* Any thread, does not block: it holds more than its share, as others came later. */
bool iswi_nbd_share_exceeded(struct iswi_nbd_client *client);

#endif
