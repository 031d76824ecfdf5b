package org.apache.iceberg.rest;

import java.net.InetSocketAddress;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.CatalogUtil;
import org.eclipse.jetty.server.Server;
import org.eclipse.jetty.servlet.ServletContextHandler;
import org.eclipse.jetty.servlet.ServletHolder;

/** Iceberg's reference server on loopback: its own `main` listens on every address. */
class ReferenceCatalog {
  public static void main(String[] arguments) throws Exception {
    Map<String, String> config = RCKUtils.environmentCatalogConfig();
    var catalog = CatalogUtil.buildIcebergCatalog("reference", config, new Configuration());
    var adapter = new RESTServerCatalogAdapter(new RESTCatalogServer.CatalogContext(catalog, config));
    var context = new ServletContextHandler();
    context.addServlet(new ServletHolder(new RESTCatalogServlet(adapter)), "/*");
    var server = new Server(new InetSocketAddress("127.0.0.1", Integer.parseInt(arguments[0])));
    server.setHandler(context);
    server.start();
    server.join();
  }
}
