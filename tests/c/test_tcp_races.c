// SPDX-License-Identifier: Apache-2.0
/*
 * Interleavings too rare to wait for, made by hand: the test plays a submitter that is stopped at
 * a bad moment, by setting what that thread would have set.
 */
#define _GNU_SOURCE 1
#include "tcp_fixture.h"
#include "transport/tcp_internal.h"

/* How long is looked whether something happens that must not: too short only hides a fault. */
#define LOOK_US 50000

static struct server server;
static struct client client;
static char memory[EXPORT_BYTES], page[ISW_PAGE_BYTES];

static struct iswi_tcp *start(void)
{
	both_start(&server, &client, server_memory, memory, 0);
	return ISWI_CONTAINER(iswi_tq_of(client.queue), struct iswi_tcp, tq);
}

static uint32_t ended(void)
{
	uint32_t count;

	pthread_mutex_lock(&client.lock);
	count = client.ended;
	pthread_mutex_unlock(&client.lock);
	return count;
}

/* A thread inside sendmsg reads a write's buffer: the queue is down, but the write is not ended. */
static void check_sender_inside(void)
{
	struct op op;
	struct iswi_tcp *tcp = start();

	pthread_mutex_lock(&tcp->tq.lock);
	tcp->sending = true;
	pthread_mutex_unlock(&tcp->tq.lock);
	op_start(&op, &client, ISWI_XFER_WRITE, 0, page, sizeof(page));
	client_shutdown(&client);
	CHECK_EQ(client_wait_down(&client), -ESHUTDOWN);
	usleep(LOOK_US);
	CHECK_EQ(ended(), 0);

	/* The system call returns. */
	pthread_mutex_lock(&tcp->tq.lock);
	tcp->sending = false;
	pthread_cond_broadcast(&tcp->tq.quiet);
	pthread_mutex_unlock(&tcp->tq.lock);
	client_wait_ended(&client, 1);
	CHECK_EQ(op.error, -ESHUTDOWN);
	both_end(&server, &client);
}

/* What others submit while one sends goes along, or is handed on: nothing is forgotten. */
static void check_sender_takes_along(void)
{
	struct op op[3];
	struct iswi_tcp *tcp = start();

	pthread_mutex_lock(&tcp->tq.lock);
	tcp->sending = true;
	pthread_mutex_unlock(&tcp->tq.lock);
	for (uint32_t i = 0; i < 3; i++) {
		op_start(&op[i], &client, ISWI_XFER_READ, 0, page, sizeof(page));
	}
	usleep(LOOK_US);
	CHECK_EQ(ended(), 0);
	iswi_tcp_send(tcp, false);
	client_wait_ended(&client, 3);
	for (uint32_t i = 0; i < 3; i++)
		CHECK_EQ(op[i].error, 0);
	both_end(&server, &client);
}

static void *destroy_main(void *opaque)
{
	struct client *client = opaque;

	client->queue->ops->destroy(client->queue);
	pthread_mutex_lock(&client->lock);
	client->queue = NULL;
	pthread_mutex_unlock(&client->lock);
	return NULL;
}

/* A submitter whose transfers all ended is still inside submit: the queue must outlive that. */
static void check_destroy_waits_for_submitter(void)
{
	pthread_t thread;
	struct iswi_tcp *tcp = start();

	pthread_mutex_lock(&tcp->tq.lock);
	tcp->tq.users++;
	pthread_mutex_unlock(&tcp->tq.lock);
	CHECK_EQ(pthread_create(&thread, NULL, destroy_main, &client), 0);
	CHECK_EQ(client_wait_down(&client), -ESHUTDOWN);
	usleep(LOOK_US);
	pthread_mutex_lock(&client.lock);
	CHECK(client.queue != NULL);
	pthread_mutex_unlock(&client.lock);
	pthread_mutex_lock(&tcp->tq.lock);
	tcp->tq.users--;
	pthread_cond_broadcast(&tcp->tq.quiet);
	pthread_mutex_unlock(&tcp->tq.lock);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	CHECK_EQ(client.downs, 1);
	server_join(&server);
}

int main(void)
{
	check_sender_inside();
	check_sender_takes_along();
	check_destroy_waits_for_submitter();
	return 0;
}
