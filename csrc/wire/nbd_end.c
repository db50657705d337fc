// SPDX-License-Identifier: Apache-2.0
/* A connection's end: counted, closed, out of the server, freed. */
#define _GNU_SOURCE 1
#include <sys/mman.h>
#include <unistd.h>

#include "wire/nbd_conn.h"

/* Who closed a connection, and is that worth counting? */
void iswi_nbd_conn_count(struct iswi_nbd_server *server, int err, bool served)
{
	if (err == -EPROTO || (err == -ETIMEDOUT && !served))
		iswi_count(&server->protocol_errors, 1);
}

void iswi_nbd_conn_close(struct iswi_nbd_conn *conn, int err)
{
	conn->server->config.backend->close(conn->server->config.ctx, &conn->export, conn);
	iswi_nbd_conn_count(conn->server, err, true);
}

void iswi_nbd_conn_free(struct iswi_nbd_conn *conn)
{
	munmap(conn, sizeof(*conn));
}

bool iswi_nbd_conn_leave(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_server *server = conn->server;
	bool stopping;

	close(conn->fd);
	conn->fd = -1;
	server->conn_count--;
	pthread_mutex_lock(&server->hand_lock);
	if (conn->worker != NULL)
		conn->worker->conn_count--;
	stopping = server->stopping;
	pthread_mutex_unlock(&server->hand_lock);
	if (!stopping)
		*conn->place = NULL;
	pthread_cond_broadcast(&server->left);
	return !stopping;
}

void iswi_nbd_conn_ended(struct iswi_nbd_conn *conn, int err)
{
	struct iswi_nbd_server *server = conn->server;
	bool left;

	iswi_nbd_conn_close(conn, err);
	pthread_mutex_lock(&server->lock);
	left = iswi_nbd_conn_leave(conn);
	pthread_mutex_unlock(&server->lock);
	if (left)
		iswi_nbd_conn_free(conn);
}
