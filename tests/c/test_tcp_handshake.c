// SPDX-License-Identifier: Apache-2.0
/* Every way in which connecting can fail has its own error, and none shows the export's name. */
#define _GNU_SOURCE 1
#include "tcp_fixture.h"

/* Fails as expected, with a message that names the port and keeps the token secret. */
static void expect_error(const struct iswi_tcp_config *config, int code, const char *words)
{
	struct client client;
	struct iswi_queue_events events = {.down = client_down, .ctx = &client};
	struct isw_error error = {0};
	char port[16];

	client_init(&client);
	CHECK_EQ(iswi_tcp_connect(config, &events, &client.queue, &error), code);
	CHECK_EQ(error.code, code);
	if (strstr(error.text, words) == NULL) {
		fprintf(stderr, "no '%s' in: %s\n", words, error.text);
		exit(1);
	}
	snprintf(port, sizeof(port), "port %u", config->port);
	CHECK(config->port == 0 || strstr(error.text, port) != NULL);
	CHECK(strstr(error.text, TOKEN) == NULL);
	CHECK_EQ(client.downs, 0);
}

static void expect_script_error(void (*script)(int fd, void *arg), int code, const char *words)
{
	struct server server;
	struct iswi_tcp_config config;

	server_start(&server, script, NULL);
	config = client_config(server.port);
	expect_error(&config, code, words);
	server_join(&server);
}

static void close_at_once(int fd, void *arg)
{
	(void)arg;
	shutdown(fd, SHUT_WR);
	server_drain(fd);
}

static void say_ssh(int fd, void *arg)
{
	(void)arg;
	server_put(fd, "SSH-2.0\r\n", 9); /* then waits, as such servers do */
	server_drain(fd);
}

static void say_http(int fd, void *arg)
{
	static const char answer[] = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";

	(void)arg;
	server_put(fd, answer, sizeof(answer) - 1);
	server_drain(fd);
}

static void say_oldstyle(int fd, void *arg)
{
	uint8_t bytes[152] = {0};

	(void)arg;
	nbd_put64(bytes, NBD_MAGIC);
	nbd_put64(bytes + 8, NBD_OLDSTYLE_MAGIC);
	nbd_put64(bytes + 16, EXPORT_BYTES);
	server_put(fd, bytes, sizeof(bytes));
	server_drain(fd);
}

static void say_not_fixed(int fd, void *arg)
{
	uint8_t greeting[NBD_GREETING_BYTES];

	(void)arg;
	nbd_put64(greeting, NBD_MAGIC);
	nbd_put64(greeting + 8, NBD_OPTION_MAGIC);
	nbd_put16(greeting + 16, 0);
	server_put(fd, greeting, sizeof(greeting));
	server_drain(fd);
}

static void say_half_greeting(int fd, void *arg)
{
	uint8_t bytes[8];

	(void)arg;
	nbd_put64(bytes, NBD_MAGIC);
	server_put(fd, bytes, sizeof(bytes));
	shutdown(fd, SHUT_WR);
	server_drain(fd);
}

static void refuse(int fd, uint32_t type)
{
	if (server_greet(fd) && server_take_go(fd))
		server_option_reply(fd, type, "no " TOKEN " here", sizeof(TOKEN) + 8);
	server_drain(fd);
}

static void say_unknown(int fd, void *arg)
{
	(void)arg;
	refuse(fd, NBD_REP_ERR_UNKNOWN);
}

static void say_tls(int fd, void *arg)
{
	(void)arg;
	refuse(fd, NBD_REP_ERR_TLS_REQD);
}

static void say_unsupported(int fd, void *arg)
{
	(void)arg;
	refuse(fd, NBD_REP_ERR_UNSUP);
}

static void say_shutting_down(int fd, void *arg)
{
	(void)arg;
	refuse(fd, NBD_REP_ERR_SHUTDOWN);
}

static void say_other_error(int fd, void *arg)
{
	(void)arg;
	refuse(fd, 0x80001234u);
}

static void grant(int fd, uint64_t bytes, uint16_t flags, uint32_t min, uint32_t max)
{
	if (server_greet(fd) && server_take_go(fd) && server_info_export(fd, bytes, flags) &&
	    server_info_blocks(fd, min, max))
		server_option_reply(fd, NBD_REP_ACK, NULL, 0);
	server_drain(fd);
}

static void grant_small(int fd, void *arg)
{
	(void)arg;
	grant(fd, EXPORT_BYTES - 1, NBD_FLAG_HAS_FLAGS, 1, 1u << 20);
}

static void grant_read_only(int fd, void *arg)
{
	(void)arg;
	grant(fd, EXPORT_BYTES, NBD_FLAG_HAS_FLAGS | NBD_FLAG_READ_ONLY, 1, 1u << 20);
}

static void grant_big_blocks(int fd, void *arg)
{
	(void)arg;
	grant(fd, EXPORT_BYTES, NBD_FLAG_HAS_FLAGS, 65536, 1u << 20);
}

static void grant_without_size(int fd, void *arg)
{
	(void)arg;
	if (server_greet(fd) && server_take_go(fd))
		server_option_reply(fd, NBD_REP_ACK, NULL, 0);
	server_drain(fd);
}

static void reply_without_end(int fd, void *arg)
{
	(void)arg;
	if (!server_greet(fd) || !server_take_go(fd))
		return;
	while (server_info_export(fd, EXPORT_BYTES, NBD_FLAG_HAS_FLAGS))
		;
}

static void reply_too_long(int fd, void *arg)
{
	uint8_t header[NBD_OPTION_REPLY_BYTES];

	(void)arg;
	nbd_put_option_reply(header, NBD_OPT_GO, NBD_REP_INFO, UINT32_MAX);
	if (server_greet(fd) && server_take_go(fd))
		server_put(fd, header, sizeof(header));
	server_drain(fd);
}

static void reply_short_info(int fd, void *arg)
{
	(void)arg;
	if (server_greet(fd) && server_take_go(fd))
		server_option_reply(fd, NBD_REP_INFO, "\0\0\0", 3);
	server_drain(fd);
}

static void reply_wrong_magic(int fd, void *arg)
{
	(void)arg;
	if (server_greet(fd) && server_take_go(fd))
		server_put(fd, "not an option's reply", 21);
	server_drain(fd);
}

/* Replies that nobody asked for are passed over. */
static void grant_chatty(int fd, void *arg)
{
	(void)arg;
	if (server_greet(fd) && server_take_go(fd) &&
	    server_option_reply(fd, NBD_REP_INFO, "\0\2describes", 11) &&
	    server_option_reply(fd, NBD_REP_INFO, "\1\0later", 7) &&
	    server_info_export(fd, EXPORT_BYTES, NBD_FLAG_HAS_FLAGS))
		server_option_reply(fd, NBD_REP_ACK, NULL, 0);
	server_drain(fd);
}

static void check_nobody_there(void)
{
	struct server server;
	struct iswi_tcp_config config;

	server_listen(&server, AF_INET);
	close(server.listen_fd);
	config = client_config(server.port);
	expect_error(&config, -ECONNREFUSED, "refused the connection");
}

static void check_silence(void)
{
	struct server server;
	struct iswi_tcp_config config;

	/* Accepted by the kernel, then nobody says a word. */
	server_listen(&server, AF_INET);
	config = client_config(server.port);
	config.connect_ms_max = 150;
	expect_error(&config, -ETIMEDOUT, "sent nothing");
	close(server.listen_fd);
}

static void check_config(void)
{
	static char long_name[NBD_NAME_BYTES_MAX + 2];
	struct iswi_tcp_config config = client_config(0);

	config.depth = 0;
	expect_error(&config, -EINVAL, "depth");
	config.depth = ISWI_TCP_DEPTH_MAX + 1;
	expect_error(&config, -EINVAL, "depth");
	config = client_config(0);
	config.request_ms_max = 0;
	expect_error(&config, -EINVAL, "requests");
	config = client_config(0);
	memset(long_name, 'x', sizeof(long_name) - 1);
	config.export_name = long_name;
	expect_error(&config, -EINVAL, "name");
	config = client_config(0);
	config.host = "no such host.invalid";
	expect_error(&config, -ENXIO, "no such host.invalid");
}

static void check_connects(const char *host, int family, void (*script)(int fd, void *arg))
{
	struct server server;
	struct client client;
	struct iswi_tcp_config config;

	server_listen(&server, family);
	server.script = script;
	server.arg = NULL;
	CHECK_EQ(pthread_create(&server.thread, NULL, server_main, &server), 0);
	config = client_config(server.port);
	config.host = host;
	client_connect(&client, &config);
	client_destroy(&client);
	CHECK_EQ(client.down_error, -ESHUTDOWN);
	server_join(&server);
}

int main(void)
{
	check_nobody_there();
	check_silence();
	check_config();
	expect_script_error(close_at_once, -ECONNRESET, "closed the connection");
	expect_script_error(say_ssh, -EPROTO, "does not speak the NBD protocol");
	expect_script_error(say_http, -EPROTO, "does not speak the NBD protocol");
	expect_script_error(say_oldstyle, -EPROTO, "old style");
	expect_script_error(say_not_fixed, -EPROTO, "fixed newstyle");
	expect_script_error(say_half_greeting, -ECONNRESET, "closed the connection");
	expect_script_error(say_unknown, -ENOENT, "no such export");
	expect_script_error(say_tls, -EACCES, "TLS");
	expect_script_error(say_unsupported, -EOPNOTSUPP, "GO");
	expect_script_error(say_shutting_down, -ECONNRESET, "shutting down");
	expect_script_error(say_other_error, -EPROTO, "0x80001234");
	expect_script_error(grant_small, -ERANGE, "are needed");
	expect_script_error(grant_read_only, -EROFS, "read-only");
	expect_script_error(grant_big_blocks, -EOPNOTSUPP, "pages");
	expect_script_error(grant_without_size, -EPROTO, "without a size");
	expect_script_error(reply_without_end, -EPROTO, "no end");
	expect_script_error(reply_too_long, -EPROTO, "too long");
	expect_script_error(reply_short_info, -EPROTO, "wrong length");
	expect_script_error(reply_wrong_magic, -EPROTO, "another option");
	check_connects("127.0.0.1", AF_INET, grant_chatty);
	check_connects("localhost", AF_INET, grant_chatty);
	check_connects("::1", AF_INET6, grant_chatty); /* last: may skip */
	return 0;
}
