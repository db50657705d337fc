// SPDX-License-Identifier: Apache-2.0
/*
 * A client with several connections (the kernel's nbd) that loses patience with one of them shuts
 * it down and sends what was in flight there again on another. We have both then, and what we
 * received on the first may not have been submitted yet: its thread waited for a buffer, or for a
 * processor. Submitted later it would undo what the client has written since.
 *
 * So each receive that brought something is followed by a look at all the others, before anything
 * it brought is submitted. Whoever sends again has shut the old connection down before, so this
 * look sees it; then the old connection's gate is shut. A request passes its own gate to be
 * submitted: it is either submitted before those that were sent again, or never. That is enough,
 * as requests for one page take effect in the order in which they are submitted.
 */
#define _GNU_SOURCE 1
#include <poll.h>

#include "wire/nbd_conn.h"

/* Looked at in one call; further ones in another. */
#define LOOK_MAX 16u

void iswi_nbd_fence_join(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_server *server = conn->server;

	if (!server->config.fenced)
		return;
	pthread_mutex_lock(&server->fence_lock);
	conn->fence_next = server->fence_members;
	server->fence_members = conn;
	pthread_mutex_unlock(&server->fence_lock);
}

/* From here on it submits nothing, and nobody looks at it. */
void iswi_nbd_fence_leave(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_server *server = conn->server;
	struct iswi_nbd_conn **at;

	if (!server->config.fenced)
		return;
	pthread_mutex_lock(&server->fence_lock);
	for (at = &server->fence_members; *at != conn; at = &(*at)->fence_next)
		;
	*at = conn->fence_next;
	pthread_mutex_unlock(&server->fence_lock);
}

/* fence_lock held. Shuts the gates of those that the client has shut down. */
static void shut_dead(struct pollfd *looks, struct iswi_nbd_conn **conns, unsigned count)
{
	/* Only a signal could interrupt it, and these threads take none. */
	if (count == 0 || poll(looks, count, 0) <= 0)
		return;
	for (unsigned i = 0; i < count; i++) {
		if (looks[i].revents == 0)
			continue;
		pthread_mutex_lock(&conns[i]->tx.gate);
		conns[i]->tx.shut = true;
		pthread_mutex_unlock(&conns[i]->tx.gate);
	}
}

static void look_at_others(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_server *server = conn->server;
	struct iswi_nbd_conn *conns[LOOK_MAX];
	struct pollfd looks[LOOK_MAX];
	unsigned count = 0;

	pthread_mutex_lock(&server->fence_lock);
	for (struct iswi_nbd_conn *other = server->fence_members; other != NULL;
	     other = other->fence_next) {
		if (other == conn)
			continue;
		if (count == LOOK_MAX) {
			shut_dead(looks, conns, count);
			count = 0;
		}
		looks[count] = (struct pollfd){.fd = other->fd, .events = POLLRDHUP};
		conns[count++] = other;
	}
	shut_dead(looks, conns, count);
	pthread_mutex_unlock(&server->fence_lock);
}

bool iswi_nbd_fence_submit(struct iswi_nbd_conn *conn, struct iswi_nbd_request *request)
{
	bool shut;

	if (conn->server->config.fenced && conn->looked != conn->received) {
		conn->looked = conn->received;
		look_at_others(conn);
	}
	pthread_mutex_lock(&conn->tx.gate);
	shut = conn->tx.shut;
	if (!shut)
		conn->server->config.backend->submit(&conn->export, request);
	pthread_mutex_unlock(&conn->tx.gate);
	return !shut;
}
